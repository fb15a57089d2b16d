"""Time one GEMM of a library with PyTorch's arithmetic switches set, and check the result."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, unsupported_rocm_reason
from workloads.instruments import device as devices
from workloads.instruments.products import Operands, relative_error, tolerance
from workloads.instruments.runs import check_error, measure_calls, prepare
from workloads.instruments.timing import run_for
from workloads.matmul import MatmulParameters, rules, tunable
from workloads.matmul.operands import make_operands
from workloads.precision.formats import rocm_of_build

# The backends that select a library in PyTorch, and the backend names of libraries, keyed by PyTorch's names.
SELECTED = ("cublas", "cublaslt", "ck")
CUDA_LIBRARIES = {"Cublas": "cublas", "Cublaslt": "cublaslt"}
ROCM_LIBRARIES = {"Cublas": "hipblas", "Cublaslt": "hipblaslt", "Ck": "ck"}
# torch's switches that round partial sums, by data type.
REDUCING = {dtype: f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")}


def measure(parameters: MatmulParameters, rank: Rank) -> Measurement:
    """Time C = A·B on random operands. Every repeat overwrites the output, and all times are kept.

    Raises Infeasible if the device or this build of PyTorch does not support the combination of parameters, and
    ArithmeticError if the result is wrong.
    """
    device, architecture, generator = prepare(parameters, rank, unsupported_reason)
    shape, recipe = parameters.shape(), RECIPES[parameters.dtype]
    make = partial(make_operands, parameters, device, generator, architecture)
    with arithmetic(parameters, architecture):
        _warm_up(device, parameters.warmup_s)
        operands = make()
        with _tuned(parameters, operands) as tuning:
            measured = measure_calls(
                operands.multiply, lambda: make().multiply, operands.bytes, device, parameters, rank.clock_mhz
            )
            c = operands.multiply()
        # These values are read back while the switches are set.
        machine_info: dict[str, Any] = {
            "layout": operands.layout,
            "output_dtype": str(c.dtype).removeprefix("torch."),
            "operands": str(operands.a.dtype),
            "accumulation": executed_accumulation(parameters, architecture),
            **library(parameters, architecture),
        }
        executed = vars(parameters) | {"backend": executed_backend(parameters), "seed": generator.initial_seed()}
    executed |= {name: machine_info[name] for name in ("accumulation", "layout") if getattr(parameters, name) != "auto"}
    if parameters.model is None:
        values_per_element = 2 if operands.a.dtype == torch.float4_e2m1fn_x2 else 1
        executed |= {"m": c.shape[0], "n": c.shape[1], "k": operands.a.shape[1] * values_per_element}
    name = f"the {parameters.dtype} product {shape.m}x{shape.n}x{shape.k}"
    error, limit = relative_error((operands.a, operands.b, c)), tolerance(recipe.matrix_dtype, architecture)
    metrics = {"relative_error": check_error(name, error, limit)}
    if parameters.model:
        metrics |= {"m": float(c.shape[0]), "n": float(c.shape[1]), "k": float(shape.k)}
    if tuning is not None:
        machine_info["tuned_kernel"], metrics["tuning_s"] = tuning.kernel, tuning.seconds
    return replace(
        measured,
        executed=executed | {"repeats": len(measured.step_times_s)},
        statistic=parameters.statistic.partition("_")[0],
        flops_per_step=2.0 * shape.m * shape.n * shape.k,
        matrix_dtype=recipe.matrix_dtype,
        metrics={**metrics, **measured.metrics},
        machine_info={**measured.machine_info, **machine_info},
    )


def unsupported_reason(parameters: MatmulParameters, architecture: str) -> str:
    """Return why the device, this build of PyTorch or the environment does not support the combination, or ""."""
    reason = unsupported_rocm_reason(parameters.dtype, rocm_of_build())
    reason = reason or rules.unsupported_reason(parameters, architecture)
    if reason or parameters.backend == "tunable" or not (torch.version.hip and torch.cuda.tunable.is_enabled()):
        return reason
    routed = "PYTORCH_TUNABLEOP_ENABLED routes every product through TunableOp"
    return f"backend={parameters.backend}: {routed}; unset it, or set backend=tunable"


@cache
def _warm_up(device: torch.device, seconds: float) -> None:
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    c = torch.empty_like(a)
    run_for(seconds, 10 * [lambda: torch.mm(a, a, out=c)], device)


def _tuned(parameters: MatmulParameters, operands: Operands) -> AbstractContextManager[tunable.Tuning | None]:
    """If TunableOp is the backend, make PyTorch run the kernel that TunableOp finds within the context."""
    if parameters.backend != "tunable":
        return nullcontext()
    rotating_mib = devices.flush_mib(operands.a.device) if parameters.statistic.endswith("_cold") else 0
    return tunable.tuned(operands.multiply, f"{parameters.dtype} {parameters.shape()}", rotating_mib)


@contextmanager
def arithmetic(parameters: MatmulParameters, architecture: str) -> Iterator[None]:
    """Set PyTorch's arithmetic for one trial and restore it afterwards. Raises Infeasible if the library is missing."""
    settings, backend = torch.backends.cuda.matmul, parameters.backend
    reduced = rules.executed_accumulation(parameters, architecture) == "reduced"
    # fp32 is never executed as tf32, which is a different type with a different peak.
    switches = {"allow_tf32": parameters.dtype == "tf32"} | dict.fromkeys(REDUCING.values(), reduced)
    before = {name: getattr(settings, name) for name in switches}
    library_before = torch.backends.cuda.preferred_blas_library()
    if backend == "torch" and architecture.startswith("gfx") and rules.sums_into_fp32_output(parameters):
        backend = "cublas"  # hipblasGemmEx: otherwise PyTorch may use either library, see rules.UNPROMISED
    try:
        for name, value in switches.items():
            setattr(settings, name, value)
        if backend in SELECTED:
            try:
                torch.backends.cuda.preferred_blas_library(backend)
            except RuntimeError as error:  # a build without CK, for example
                raise Infeasible(f"backend={parameters.backend}: {str(error).splitlines()[0]}") from error
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
        torch.backends.cuda.preferred_blas_library(library_before)


def executed_accumulation(parameters: MatmulParameters, architecture: str) -> str:
    """Return the accumulation that is in effect now: PyTorch's setting for 16-bit types on NVIDIA GPUs, otherwise the
    rules' value."""
    switch = REDUCING.get(parameters.dtype)
    if switch is None or not architecture.startswith("sm") or parameters.backend not in rules.LIBRARY_BACKENDS:
        return rules.executed_accumulation(parameters, architecture)
    return "reduced" if getattr(torch.backends.cuda.matmul, switch) else "fp32"


def executed_backend(parameters: MatmulParameters) -> str:
    """Return PyTorch's own choice if the backend selects a library (it may differ on some GPUs), else the backend."""
    name = _preferred()
    return CUDA_LIBRARIES.get(name, name.lower()) if parameters.backend in SELECTED else parameters.backend


def library(parameters: MatmulParameters, architecture: str) -> dict[str, str]:
    """Return the library that runs the GEMM, for `machine_info`; empty if none is selected."""
    scaled = parameters.dtype not in ("fp32", "tf32", "fp16", "bf16")
    if architecture.startswith("cpu") or scaled or parameters.backend not in ("torch", *SELECTED):
        return {}
    names = ROCM_LIBRARIES if architecture.startswith("gfx") else CUDA_LIBRARIES
    return {"library": names.get(_preferred(), _preferred())}


def _preferred() -> str:
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
