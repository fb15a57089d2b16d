"""The search by TunableOp. A CPU build of PyTorch has none: a stand-in records the calls. A GPU has the real one."""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch.cuda import tunable as torch_tunable

from tests.support.amd_device import amd_device
from workloads.instruments import device as devices
from workloads.matmul import MatmulParameters, gemm, tunable
from workloads.matmul.operands import make_operands


@dataclass
class StandInTunableOp:
    """The functions of torch.cuda.tunable that the project calls, with its states and its table of results."""

    filename: str = "tunableop_results0.csv"
    max_ms: int = 0
    rotating_mib: int = -1
    enabled: bool = False
    tuning: bool = False
    results: list[tuple[str, str, str, float]] = field(default_factory=list)
    log: list[tuple[bool, bool]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, attribute in [
            ("set_filename", "filename"),
            ("set_max_tuning_duration", "max_ms"),
            ("set_rotating_buffer_size", "rotating_mib"),
            ("enable", "enabled"),
            ("tuning_enable", "tuning"),
        ]:
            patch.setattr(torch_tunable, name, lambda value, attribute=attribute: setattr(self, attribute, value))
        patch.setattr(torch_tunable, "is_enabled", lambda: self.enabled)
        patch.setattr(torch_tunable, "get_results", lambda: list(self.results))
        patch.setattr(torch.cuda, "synchronize", lambda: None)

    def multiply(self, size: int = 64) -> None:
        """Behave as a product: tune an unknown one where tuning is enabled."""
        self.log.append((self.enabled, self.tuning))
        known = any(result[1] == f"nn_{size}" for result in self.results)
        if self.enabled and self.tuning and not known:
            self.results.append(("GemmTunableOp_BFloat16_NN", f"nn_{size}", f"Gemm_Hipblaslt_{size}", 0.01))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandInTunableOp:
    monkeypatch.setattr(tunable, "_chosen_kernels", {})
    stand_in = StandInTunableOp()
    stand_in.install(monkeypatch)
    return stand_in


def test_a_product_is_tuned_before_the_block_and_only_looked_up_within(stand_in: StandInTunableOp) -> None:
    with tunable.tuned(stand_in.multiply, "64", rotating_mib=512) as tuning:
        stand_in.multiply()
        stand_in.multiply(size=128)  # a product of another shape is not tuned in the timed part
    stand_in.multiply()
    assert tuning.kernel == "Gemm_Hipblaslt_64" and tuning.seconds > 0
    assert stand_in.log == [(True, True), (True, False), (True, False), (False, False)]
    assert len(stand_in.results) == 1
    assert (stand_in.max_ms, stand_in.rotating_mib) == (tunable.MAX_TUNING_MS, 512)


def test_a_product_that_was_tuned_before_keeps_its_kernel(stand_in: StandInTunableOp) -> None:
    for _ in range(2):
        with tunable.tuned(stand_in.multiply, "64", rotating_mib=0) as tuning:
            pass
        with tunable.tuned(lambda: stand_in.multiply(128), "128", rotating_mib=0):
            pass
    assert tuning.kernel == "Gemm_Hipblaslt_64"


def test_an_error_of_the_product_disables_tunableop(stand_in: StandInTunableOp) -> None:
    def fail() -> None:
        raise RuntimeError("HIPBLAS_STATUS_INTERNAL_ERROR")

    with pytest.raises(RuntimeError, match="HIPBLAS"), tunable.tuned(fail, "64", rotating_mib=0):
        pytest.fail("the block must not run")
    assert not stand_in.enabled and not stand_in.tuning


def test_results_stay_out_of_the_users_folder(stand_in: StandInTunableOp) -> None:
    with tunable.tuned(stand_in.multiply, "64", rotating_mib=0):
        folder = Path(stand_in.filename).parent
        assert folder.is_dir() and folder.parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(("statistic", "rotating_mib"), [("median_cold", devices.CPU_FLUSH_MIB), ("median_warm", 0)])
def test_the_search_has_the_cache_of_the_measurement(
    statistic: str, rotating_mib: int, stand_in: StandInTunableOp
) -> None:
    parameters = MatmulParameters(m=8, n=8, k=8, dtype="fp32", backend="tunable", statistic=statistic)  # type: ignore[arg-type]
    device = torch.device("cpu")
    operands = make_operands(parameters, device, torch.Generator().manual_seed(0), "gfx942")
    with gemm._tuned(parameters, replace(operands, multiply=stand_in.multiply)) as tuning:
        assert tuning is not None and tuning.kernel == "Gemm_Hipblaslt_64"
    assert stand_in.rotating_mib == rotating_mib
    with gemm._tuned(replace(parameters, backend="torch"), operands) as tuning:
        assert tuning is None and not stand_in.enabled


def test_tunableop_for_every_product_is_refused_for_other_backends(stand_in: StandInTunableOp) -> None:
    """PYTORCH_TUNABLEOP_ENABLED overrides torch.cuda.tunable.enable: the product would not be torch.mm's default."""
    parameters = MatmulParameters(m=64, n=64, k=64, dtype="bf16")
    stand_in.enabled = True
    with amd_device():
        reason = gemm.unsupported_reason(parameters, "gfx942:sramecc+:xnack-")
    assert reason.startswith("backend=torch: PYTORCH_TUNABLEOP_ENABLED routes every product")
    assert not gemm.unsupported_reason(parameters, "sm90")  # on CUDA it knows the default kernel alone


@pytest.mark.gpu
def test_pytorchs_tunableop_is_driven_as_its_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA it chooses the default kernel, but tables, files and states are those of ROCm."""
    monkeypatch.chdir(tmp_path)
    a = torch.randn(192, 320, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(320, 64, device="cuda", dtype=torch.bfloat16)
    with tunable.tuned(lambda: torch.mm(a, b), "gpu test", rotating_mib=64) as tuning:
        assert torch_tunable.is_enabled() and not torch_tunable.tuning_is_enabled()
        torch.mm(a, b)
    assert not torch_tunable.is_enabled()
    assert (tuning.kernel == "Default") == (torch.version.hip is None)
    assert list(tmp_path.iterdir()) == []
