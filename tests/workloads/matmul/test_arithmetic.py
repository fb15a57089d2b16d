"""The library and the switches that a trial selects, and their names. The AMD GPU and its libraries are stand-ins."""

import pytest
import torch

from workloads.api.contract import Infeasible
from workloads.matmul import MatmulParameters
from workloads.matmul.gemm import arithmetic, executed_accumulation, executed_backend, library

MI300X = "gfx942:sramecc+:xnack-"


class StandInLibraries:
    """PyTorch's choice among three libraries, as its function reports it on ROCm, where hipBLASLt is the default."""

    def __init__(self, *, has_ck: bool = True) -> None:
        self.current, self.has_ck = "Cublaslt", has_ck

    def select(self, backend: str | None = None) -> str:
        if backend == "ck" and not self.has_ck:
            raise RuntimeError("Cannot set preferred blas backend to CK since following conditions are not true")
        if backend is not None:
            names = {"cublas": "Cublas", "cublaslt": "Cublaslt", "ck": "Ck"}
            self.current = names.get(backend, backend.rpartition(".")[2])
        return f"_BlasBackend.{self.current}"


def product(**parameters: str) -> MatmulParameters:
    return MatmulParameters(m=64, n=64, k=64, **{"dtype": "bf16", **parameters})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "executed", "name"),
    [
        ({}, "torch", "hipblaslt"),
        ({"backend": "cublas"}, "cublas", "hipblas"),
        ({"backend": "cublaslt"}, "cublaslt", "hipblaslt"),
        ({"backend": "ck"}, "ck", "ck"),
        ({"output_dtype": "fp32"}, "torch", "hipblas"),
    ],
)
def test_the_library_on_rocm_has_its_own_name(
    parameters: dict[str, str], executed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = StandInLibraries()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.select)
    with arithmetic(product(**parameters), MI300X):
        assert executed_backend(product(**parameters)) == executed
        assert library(product(**parameters), MI300X) == {"library": name}
    assert libraries.current == "Cublaslt"


def test_a_build_without_ck_is_infeasible_with_pytorchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", StandInLibraries(has_ck=False).select)
    before = torch.backends.cuda.matmul.allow_tf32
    parameters = product(backend="ck")
    reason = "backend=ck: Cannot set preferred blas backend to CK"
    with pytest.raises(Infeasible, match=reason), arithmetic(parameters, MI300X):
        pytest.fail("the block must not run")
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_reduced_accumulation_is_set_where_it_has_an_effect_and_restored() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    for architecture, accumulation in (("sm90", "reduced"), (MI300X, "fp32")):
        with arithmetic(product(), architecture):
            assert bool(settings.allow_bf16_reduced_precision_reduction) == (accumulation == "reduced")
            assert executed_accumulation(product(), architecture) == accumulation
    assert settings.allow_bf16_reduced_precision_reduction == before
    with arithmetic(product(accumulation="fp32"), "sm90"):
        assert executed_accumulation(product(accumulation="fp32"), "sm90") == "fp32"


def test_a_product_without_a_selected_library_names_none() -> None:
    assert library(product(), "cpu bf16") == {} == library(product(dtype="fp8_rowwise"), MI300X)
    assert library(product(backend="tunable"), MI300X) == {} == library(product(backend="triton"), "sm90")
