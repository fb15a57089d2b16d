"""The rules of this project's own trainer that a layout's degrees alone do not show.

`workloads.parallel.rules` has all of them and is what a sweep is held against; a test compares the two.
"""

from __future__ import annotations

from workloads.estimator.precisions import find_precision
from workloads.layouts.job import V_SCHEDULES, Job

SPLIT_SCHEDULES = ("zero_bubble", *V_SCHEDULES)  # which compute gradients of inputs and of weights one after the other
PLAIN_PRECISIONS = ("bf16", "fp32")
PRECISIONS = (*PLAIN_PRECISIONS, "fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4")  # those of `workload=parallel`


def find_own_violation(job: Job) -> str:
    """Return why this project's trainer does not run a job; empty where it does, or another trainer is planned."""
    if job.trainer != "own":
        return ""
    return next(filter(None, (check(job) for check in CHECKS)), "")


def _check_precision(job: Job) -> str:
    if job.precision in PRECISIONS:
        return ""
    return f"precision={job.precision}: workload=parallel does not train in it. Available: {', '.join(PRECISIONS)}"


def _check_split_backward(job: Job) -> str:
    layout, schedule = job.layout, job.layout.schedule
    if schedule not in SPLIT_SCHEDULES:
        return ""
    if job.compiled:
        return f"schedule={schedule}: splits the backward pass, which a compiled block does not support"
    if layout.checkpointing == "selective":
        return f"schedule={schedule}: does not support checkpointing=selective"
    is_wrapped = job.state == "fp32" or layout.dp * layout.cp > 1
    if is_wrapped and layout.reshard_after_forward:
        return f"schedule={schedule}: computes wrong gradients with reshard_after_forward=true"
    if job.precision not in PLAIN_PRECISIONS:
        return f"schedule={schedule}: does not support precision={job.precision}"
    return ""


def _check_embedding(job: Job) -> str:
    layout, model = job.layout, job.model
    if model.tied and layout.pp > 1:
        return "the model's head is its embedding: pp has to be 1"
    if model.vocabulary % layout.tp:
        return f"tp {layout.tp} does not divide {model.vocabulary} tokens of the vocabulary"
    return ""


def _check_methods(job: Job) -> str:
    layout = job.layout
    if layout.cp_method == "ring" and layout.cp == 1:
        return "cp_method=ring needs cp above 1"
    if layout.tp_overlap == "async" and (layout.tp == 1 or not job.compiled):
        return "tp_overlap=async needs tp above 1 and compiled blocks"
    return ""


def _check_low_precision(job: Job) -> str:
    layout, tp, model = job.layout, job.layout.tp, job.model
    if job.precision in PLAIN_PRECISIONS:
        return ""
    if tp > 1 and not job.precision.startswith("fp8"):
        return f"precision={job.precision}: has no tensor parallel layers, tp has to be 1"
    multiple = find_precision(job.precision).multiple
    tokens = layout.micro_batch * job.sequence_length // layout.cp
    if tokens % multiple:
        return f"precision={job.precision}: {tokens} tokens on a GPU are no multiple of {multiple}"
    sizes = (model.heads * model.head_size, 2 * model.kv_heads * model.head_size, model.intermediate_size)
    if any(size % multiple for size in (model.hidden_size, *(size // tp for size in sizes))):
        return f"precision={job.precision}: tp {tp} leaves sizes that are no multiples of {multiple}"
    return ""


CHECKS = (_check_precision, _check_split_backward, _check_embedding, _check_methods, _check_low_precision)
