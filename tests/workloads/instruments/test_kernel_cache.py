"""Compiled kernels are kept in one folder for all trials of a machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workloads.instruments.process_setup import keep_compiled_kernels

VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    for variable in VARIABLES:
        os.environ.pop(variable, None)


def test_folders_of_the_user_remain(tmp_path: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = "/elsewhere"
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "gpu-sweeper" / "kernels" / "inductor")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_the_default_that_torch_writes_into_the_environment_is_replaced(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(tmp_path)
    keep_compiled_kernels()
    assert cache_dir() == str(tmp_path / "gpu-sweeper" / "kernels" / "inductor")


def test_a_cache_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "gpu-sweeper").write_text("a file")
    keep_compiled_kernels()
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.soak
def test_what_a_process_compiled_is_found_by_the_next_one(tmp_path: Path) -> None:
    """PyTorch's compiler reads the folder that is set; the second process compiles nothing."""
    program = (
        "from workloads.instruments.process_setup import keep_compiled_kernels; keep_compiled_kernels()\n"
        "import torch; from torch._dynamo.utils import counters\n"
        "torch.compile(lambda x: x.sin() + 1)(torch.ones(8)); print(dict(counters['inductor']))"
    )
    hits = [
        subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert "'fxgraph_cache_miss': 1" in hits[0].stdout and "'fxgraph_cache_hit': 1" in hits[1].stdout
    assert (tmp_path / "gpu-sweeper" / "kernels" / "inductor").is_dir()
