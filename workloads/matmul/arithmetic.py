"""PyTorch's arithmetic switches and its matrix library: set for one trial, and read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workloads.api.contract import Infeasible
from workloads.matmul import MatmulParameters, rules

# The names of a backend's library in PyTorch, and those of the library that runs, by PyTorch's name of it.
SELECTED = ("cublas", "cublaslt", "ck")
CUDA_LIBRARIES = {"Cublas": "cublas", "Cublaslt": "cublaslt"}
ROCM_LIBRARIES = {"Cublas": "hipblas", "Cublaslt": "hipblaslt", "Ck": "ck"}
# The switches that round partial sums, by data type.
REDUCING = {dtype: f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")}


@contextmanager
def arithmetic(parameters: MatmulParameters, architecture: str) -> Iterator[None]:
    """Set PyTorch's arithmetic switches for one trial and restore them: the next trial may need others.

    Raises Infeasible if this build of PyTorch does not have the library.
    """
    settings, backend = torch.backends.cuda.matmul, parameters.backend
    reduced = rules.executed_accumulation(parameters, architecture) == "reduced"
    # fp32 is never executed as tf32, which is another type with another peak.
    switches = {"allow_tf32": parameters.dtype == "tf32"} | dict.fromkeys(REDUCING.values(), reduced)
    before = {name: getattr(settings, name) for name in switches}
    library_before = torch.backends.cuda.preferred_blas_library()
    if backend == "torch" and architecture.startswith("gfx") and rules.sums_into_fp32_output(parameters):
        backend = "cublas"  # hipblasGemmEx: otherwise PyTorch may take either library, see rules.UNPROMISED
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
    """Return what products sum in now: PyTorch's setting for 16-bit types on NVIDIA GPUs, else the rule's."""
    switch = REDUCING.get(parameters.dtype)
    if switch is None or not architecture.startswith("sm") or parameters.backend not in rules.LIBRARY_BACKENDS:
        return rules.executed_accumulation(parameters, architecture)
    return "reduced" if getattr(torch.backends.cuda.matmul, switch) else "fp32"


def executed_backend(parameters: MatmulParameters) -> str:
    """Return the library that PyTorch has selected, which may refuse one on some GPUs; else the requested backend."""
    name = _preferred()
    return CUDA_LIBRARIES.get(name, name.lower()) if parameters.backend in SELECTED else parameters.backend


def library(parameters: MatmulParameters, architecture: str) -> dict[str, str]:
    """Return the library that runs the product as `machine_info` has it; empty where none is selected."""
    scaled = parameters.dtype not in ("fp32", "tf32", "fp16", "bf16")
    if architecture.startswith("cpu") or scaled or parameters.backend not in ("torch", *SELECTED):
        return {}
    names = ROCM_LIBRARIES if architecture.startswith("gfx") else CUDA_LIBRARIES
    return {"library": names.get(_preferred(), _preferred())}


def _preferred() -> str:
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
