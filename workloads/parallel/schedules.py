"""The pipeline schedules of PyTorch, carried out over a rank's stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from workloads.layouts.layout import Layout, Schedule
from workloads.parallel.stage import Stage

SCHEDULES: dict[Schedule, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
NAMES = {schedule: name for name, schedule in SCHEDULES.items()}


def build_schedule(
    stages: list[Stage],
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    loss_function: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return the layout's schedule over this rank's stages, with `mesh` that of the pipeline."""
    pipeline_stages = [
        pipelining.PipelineStage(stage, index, layout.stages, device, group=mesh.get_group())
        for stage, index in zip(stages, layout.list_stages(mesh.get_local_rank()), strict=True)
    ]
    one_or_more = pipeline_stages[0] if layout.schedule == "1f1b" else pipeline_stages
    return SCHEDULES[layout.schedule](one_or_more, layout.microbatches, loss_fn=loss_function)
