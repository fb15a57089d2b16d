"""torchtitan's and Megatron-LM's own parsers accept the files that are written for them.

They need the trainers, which are in an environment of their own (docs/guides/plan.md says how to make it). Its
interpreter is named by TRAINERS_PYTHON, and a checkout of Megatron-LM by MEGATRON_LM: the package megatron-core has no
arguments.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from workloads.formats.files import render
from workloads.layouts.layout import Job, Layout
from workloads.models.model import Model

LLAMA = Model(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_405B = Model(126, 16384, 128, 8, 128, 53248, 128256)
EXPERTS = Model(48, 2048, 32, 4, 128, 0, 151936, experts=128, experts_per_token=8, expert_intermediate_size=768)
GPT = Model(48, 6144, 64, 64, 96, 24576, 51200, "gelu", True, True, True, "learned", 8192)
BASE = Layout(dp_shard=4, tp=2, global_batch=32)
PIPELINE = replace(BASE, dp_shard=2, pp=2)
TORCHTITAN = [
    Job(LLAMA, BASE, 8192),
    Job(LLAMA, replace(BASE, dp_replicate=2, cp=2, cp_method="ring", checkpointing="per_op"), 8192),
    Job(LLAMA, replace(PIPELINE, schedule="interleaved", stages_per_rank=4, checkpointing="full"), 8192),
    Job(LLAMA_405B, replace(PIPELINE, schedule="zbv", stages_per_rank=2), 8192, precision="fp8_rowwise"),
    Job(LLAMA, replace(PIPELINE, last_stage_less_layers=2), 8192),
    Job(LLAMA, replace(BASE, checkpointing="full", checkpointed_layers=8), 8192, precision="mxfp8", compiled=False),
    Job(LLAMA, replace(BASE, tp_overlap="async", reshard_after_forward=False), 8192, precision="fp8_tensorwise"),
    Job(EXPERTS, replace(BASE, ep=8), 4096),
    Job(LLAMA, Layout(dp_replicate=8, sharding="none", global_batch=8), 8192, state="amp"),
]
ZERO1 = replace(BASE, sharding="zero1")
MEGATRON = [
    Job(LLAMA, ZERO1, 8192),
    Job(LLAMA, replace(BASE, dp_replicate=4, dp_shard=1, sharding="none", cp=2, cp_method="ring"), 8192),
    Job(LLAMA, replace(ZERO1, cp=2, dp_replicate=2, checkpointing="core_attention"), 8192, precision="fp8_te_delayed"),
    Job(
        LLAMA,
        replace(PIPELINE, sharding="zero1", schedule="interleaved", stages_per_rank=4, checkpointing="full"),
        8192,
    ),
    Job(LLAMA_405B, replace(PIPELINE, sharding="zero1", checkpointing="full", checkpointed_layers=8), 8192),
    Job(LLAMA, replace(PIPELINE, sharding="zero1", last_stage_less_layers=2), 8192),
    Job(GPT, replace(ZERO1, offload_optimizer=True), 8192, precision="fp16"),
    Job(EXPERTS, replace(ZERO1, ep=8, checkpointing="norm_act"), 4096, precision="fp8_te_blockwise"),
    Job(LLAMA, replace(BASE, tp=1, sharding="megatron_fsdp"), 8192, precision="mxfp8"),
    Job(LLAMA, replace(BASE, tp=1, sharding="fsdp2", reshard_after_forward=False), 8192),
    Job(LLAMA, replace(ZERO1, tp_overlap="async"), 8192, precision="fp8_te_current"),
]


def parse(trainer: str, jobs: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Return what the trainer's parser makes of each job's file."""
    paths = []
    for number, job in enumerate(jobs):
        rendered = render(job, job.layout.gpus, trainer)
        paths.append(folder / f"{number}_{rendered.name}")
        paths[-1].write_text(rendered.text)
    program = REPOSITORY / "tests" / "support" / "trainer_parsers.py"
    command = [os.environ["TRAINERS_PYTHON"], str(program), trainer, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(verdicts) == len(jobs), result.stderr
    assert [verdict for verdict in verdicts if "refused" in verdict] == []
    return [verdict["accepted"] for verdict in verdicts]


def has_package(name: str) -> bool:
    python = os.environ.get("TRAINERS_PYTHON")
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return python is not None and subprocess.run([python, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not has_package("torchtitan"), reason="TRAINERS_PYTHON names no interpreter with torchtitan")
def test_torchtitan_accepts_its_files(tmp_path: Path) -> None:
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    for job, parsed in zip(TORCHTITAN, parse("torchtitan", TORCHTITAN, tmp_path), strict=True):
        layout = job.layout
        assert {name: parsed[name] for name in degrees} == {name: getattr(layout, name) for name in degrees}
        assert (parsed["layers"], parsed["stages"]) == (job.model.layers, layout.pp * layout.stages_per_rank)


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.skipif(not has_package("torch"), reason="TRAINERS_PYTHON names no interpreter with torch")
def test_megatron_accepts_its_arguments(tmp_path: Path) -> None:
    for job, parsed in zip(MEGATRON, parse("megatron", MEGATRON, tmp_path), strict=True):
        layout = job.layout
        expected = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "layers": job.model.layers}
        assert {name: parsed[name] for name in expected} == expected
        assert parsed["stages"] == layout.pp * layout.stages_per_rank
        assert (parsed["recompute_granularity"] is None) == (layout.checkpointing == "none")
