"""torchtitan trains by the file that is written for it, and its log is read as the layout of the file."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workloads.formats.files import read_layout, render
from workloads.formats.torchtitan import FLAVORS
from workloads.layouts.layout import Job, Layout

LAYOUTS = [
    Layout(micro_batch=2, global_batch=8, sharding="none", checkpointing="per_op"),
    Layout(dp_shard=2, micro_batch=2, global_batch=8, checkpointing="full"),
    Layout(dp_shard=1, cp=2, micro_batch=1, global_batch=4, reshard_after_forward=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=["one GPU", "dp_shard 2", "cp 2"])
def test_torchtitan_trains_by_its_file(layout: Layout, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", exc_type=ImportError)
    if layout.gpus > torch.cuda.device_count():
        pytest.skip(f"needs {layout.gpus} GPUs")
    from benchmarks.trainers import make_text

    make_text(tmp_path, vocabulary=2000)
    state = "fp32" if layout.gpus > 1 else "amp"
    job = Job(FLAVORS["llama3", "debugmodel"], layout, 512, "torchtitan", state=state, compiled=False)
    rendered = render(job, layout.gpus)
    data = f'hf_assets_path = "{tmp_path}/assets"'
    text = rendered.text.replace('hf_assets_path = "./tests/assets/tokenizer"', data)
    text = text.replace('dataset = "c4"', f'dataset = "c4_test"\ndataset_path = "{tmp_path}/text"')
    (tmp_path / rendered.name).write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"]
    command += [*shlex.split(rendered.command)[2:]]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-4000:]
    assert "step: 20" in log
    assert read_layout(log).layout == read_layout(text).layout
