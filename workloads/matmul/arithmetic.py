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


@contextmanager
def arithmetic(parameters: MatmulParameters, architecture: str) -> Iterator[None]:
    """Set PyTorch's arithmetic switches for one trial and restore them: the next trial may need others.

    Raises:
        Infeasible: this build of PyTorch does not have the library.
    """
    settings = torch.backends.cuda.matmul
    reduced = rules.executed_accumulation(parameters, architecture) == "reduced"
    before = (
        settings.allow_tf32,
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction,
    )
    library = torch.backends.cuda.preferred_blas_library()
    try:
        # fp32 is never executed as tf32, which is another type with another peak.
        settings.allow_tf32 = parameters.dtype == "tf32"
        settings.allow_bf16_reduced_precision_reduction = reduced
        settings.allow_fp16_reduced_precision_reduction = reduced
        _select_library(parameters, architecture)
        yield
    finally:
        (
            settings.allow_tf32,
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        ) = before
        torch.backends.cuda.preferred_blas_library(library)


def _select_library(parameters: MatmulParameters, architecture: str) -> None:
    backend = parameters.backend
    if backend == "torch" and architecture.startswith("gfx") and rules.sums_into_fp32_output(parameters):
        backend = "cublas"  # hipblasGemmEx: otherwise PyTorch may take either library, see rules._check_fp32_output
    if backend not in SELECTED:
        return
    try:
        torch.backends.cuda.preferred_blas_library(backend)
    except RuntimeError as error:  # a build without CK, for example
        raise Infeasible(f"backend={parameters.backend}: {str(error).splitlines()[0]}") from error


def executed_accumulation(parameters: MatmulParameters, architecture: str) -> str:
    """Return what products sum in now: PyTorch's setting for 16-bit types on NVIDIA GPUs, else the rule's."""
    settings = torch.backends.cuda.matmul
    setting = {
        "bf16": settings.allow_bf16_reduced_precision_reduction,
        "fp16": settings.allow_fp16_reduced_precision_reduction,
    }.get(parameters.dtype)
    if setting is None or not architecture.startswith("sm") or parameters.backend not in rules.LIBRARY_BACKENDS:
        return rules.executed_accumulation(parameters, architecture)
    return "reduced" if setting else "fp32"


def executed_backend(parameters: MatmulParameters) -> str:
    """Return the library that PyTorch has selected, which may refuse one on some GPUs; else the requested backend."""
    if parameters.backend not in SELECTED:
        return parameters.backend
    name = _preferred()
    return CUDA_LIBRARIES.get(name, name.lower())


def library(parameters: MatmulParameters, architecture: str) -> dict[str, str]:
    """Return the library that runs the product as `machine_info` has it; empty where none is selected."""
    scaled = parameters.dtype not in ("fp32", "tf32", "fp16", "bf16")
    if architecture.startswith("cpu") or scaled or parameters.backend not in ("torch", *SELECTED):
        return {}
    names = ROCM_LIBRARIES if architecture.startswith("gfx") else CUDA_LIBRARIES
    return {"library": names.get(_preferred(), _preferred())}


def _preferred() -> str:
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
