"""Convert a command's layout to a planner job, by the rules of the command's trainer. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from workloads.api.contract import Estimate, Machine
from workloads.command.template import fill, fill_all
from workloads.estimator.estimate import bands
from workloads.estimator.memory import peak_memory
from workloads.estimator.step import step_seconds
from workloads.formats.logs import DTYPES
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import DEGREES, LAYOUT_FIELDS, LESS_LAYERS, Job, Layout, State, describe
from workloads.layouts.rules import find_common_violation, find_violation
from workloads.layouts.trainers import OWN, find_trainer
from workloads.models.model import MODELS

if TYPE_CHECKING:
    from workloads.command import CommandSettings

SETTABLE_FIELDS = (*LAYOUT_FIELDS, "compiled", "state")
COUNTS = (*DEGREES, "ep", "stages_per_rank", "micro_batch", "global_batch")
# The planner's names for formats with other names in programs. Megatron-LM and NeMo use delayed fp8 scales by default.
PRECISION_NAMES = {"fp8_hybrid": "fp8_te_delayed", **DTYPES}


def estimate_layout(settings: CommandSettings, values: Mapping[str, Any], machine: Machine) -> Estimate:
    """Check a layout's rules, and estimate the layout's speed and, for a known trainer, its memory."""
    try:
        job = read_job(settings, values, machine)
    except (KeyError, ValueError, TypeError) as error:
        return Estimate(f"is not a layout: {error}", "the parameters are a layout", description=str(dict(values)))
    description, topology = describe(job.layout), machine.cluster.topology
    # A domain has at least as many GPUs as a node.
    topology = replace(topology, gpus_per_domain=max(topology.gpus_per_domain, machine.ranks_per_node))
    cluster = replace(machine.cluster, topology=topology, gpus=machine.world_size)
    find = find_violation if settings.trainer else find_common_violation  # `read_job` calls an unknown trainer own
    if violation := find(job, cluster):
        return Estimate(violation.reason, violation.rule, description=description)
    if job.model.layers % job.layout.pp and not any(job.layout.less_layers):
        reason = f"pp {job.layout.pp} does not divide {job.model.layers} layers"
        return Estimate(reason, "pp divides the layers", description=description)
    memory = {}
    if settings.trainer:
        memory["memory_gib"] = memory_gib = peak_memory(job, cluster).needed_gib
        least_gib = memory_gib * (1 - bands()["memory"][-1].ends.below)
        if machine.memory_gib is not None and least_gib > machine.memory_gib:
            reason = f"needs {least_gib:.1f} GiB of device memory at least, the device has {machine.memory_gib:.1f}"
            return Estimate(reason, "the layout fits into memory", memory, description)
    tokens_per_s = job.layout.global_batch * job.sequence_length / step_seconds(job, cluster)
    return Estimate(metrics={"tokens_per_s": tokens_per_s, **memory}, description=description)


def read_job(settings: CommandSettings, values: Mapping[str, Any], machine: Machine) -> Job:
    """Return the job that a command runs with these parameters. Raises ValueError if a value is not allowed.

    The ranks not covered by the given degrees become dp_shard, or dp_replicate if dp_shard is given. A data type
    without a planner recipe is estimated as bf16.
    """
    name, device = settings.trainer or OWN, machine.cluster.device
    trainer, model = find_trainer(name), MODELS[fill(settings.model, values)]
    given = {"global_batch": int(fill(settings.global_batch, values)), **fill_all(settings.layout, values)}
    if given.get("checkpointing") == "selective":
        # Selective checkpointing covers every second layer in torchtitan 0.2.2
        # (activation_checkpoint.selective_ac_option), and the attention core in Megatron-LM (--recompute-granularity).
        if name == "torchtitan":
            given |= {"checkpointing": "full", "checkpointed_layers": model.layers // 2}
        elif trainer.core == "megatron":
            given["checkpointing"] = "core_attention"
    compiled, given_state = bool(given.pop("compiled", False)), str(given.pop("state", "fp32"))
    state: Any = DTYPES.get(given_state, given_state)
    if reason := trainer.find_unsupported(given | ({"state": state} if settings.trainer else {})):
        raise ValueError(reason)
    layout = Layout(**given)
    for field in COUNTS:
        if not isinstance(number := getattr(layout, field), int) or number < 1:
            raise ValueError(f"{field}={number}, it has to be a whole number from 1")
    for field in LESS_LAYERS:
        if not isinstance(number := getattr(layout, field), int):
            raise ValueError(f"{field}={number}, it has to be a whole number")
    remaining = max(1, machine.world_size // layout.gpus)
    if "dp_shard" in given:
        layout = replace(layout, dp_replicate=layout.dp_replicate * remaining)
    else:
        layout = replace(layout, dp_shard=remaining)
    if name == "torchtitan" and "reshard_after_forward" not in given:
        layout = replace(layout, reshard_after_forward=layout.pp == 1)  # fsdp_reshard_after_forward=default
    if layout.dp_shard * layout.cp == 1:
        layout = replace(layout, sharding="none", reshard_after_forward=True)
    elif "sharding" not in given:
        layout = replace(layout, sharding=next(value for value in trainer.search["sharding"] if value != "none"))
    dtype = fill(settings.dtype, values)
    recipe = PRECISIONS.get(precision := PRECISION_NAMES.get(dtype, dtype))
    is_known = recipe is not None and recipe.dtype in {*device.peak_tflops, *device.sustained_tflops}
    if state not in get_args(State):
        raise ValueError(f"state={given_state}, it has to be one of {', '.join(get_args(State))}")
    return Job(
        model=model,
        layout=layout,
        sequence_length=int(fill(settings.sequence_length, values)),
        trainer=name,
        precision=precision if is_known else "bf16",
        state=state,
        compiled=compiled,
    )
