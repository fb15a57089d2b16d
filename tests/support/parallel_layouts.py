"""The layouts whose training is compared with that of one process."""

from dataclasses import replace

from tests.support.parallel_ranks import BATCH
from workloads.layouts.layout import Layout

LAYOUTS = [
    Layout(),
    Layout(dp_shard=2, micro_batch=2),
    Layout(dp_shard=2, micro_batch=2, reshard_after_forward=False, checkpointing="selective_up"),
    Layout(dp_replicate=2, dp_shard=2, checkpointing="full"),
    Layout(cp=2, cp_method="ring", micro_batch=4),
    Layout(cp=2, dp_shard=2, micro_batch=4, checkpointing="full"),
    Layout(dp_shard=2, tp=2, micro_batch=4, checkpointing="selective"),
    Layout(pp=2, micro_batch=2, last_stage_less_layers=2),
    Layout(pp=4, micro_batch=2, checkpointing="full", checkpointing_freq=2),
    Layout(pp=2, stages_per_rank=2, schedule="zbv", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, stages_per_rank=2, schedule="dualpipev", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, dp_shard=2, stages_per_rank=2, schedule="interleaved"),
    Layout(pp=2, dp_shard=2, stages_per_rank=2, schedule="zero_bubble", reshard_after_forward=False),
    Layout(pp=2, cp=2, micro_batch=4),
]
# With the manual block, and with state bf16: without FSDP on one rank, and without clipping.
MANUAL_LAYOUTS = [
    Layout(micro_batch=4, checkpointing="selective_up"),
    Layout(dp_shard=2, micro_batch=2, reshard_after_forward=False, checkpointing="selective"),
    Layout(pp=2, dp_shard=2, micro_batch=2, checkpointing="full"),
    Layout(checkpointing="selective", checkpointing_freq=2),
]
# Slow ones, which combine what the layouts above have, and some that are contained in those.
LONG_LAYOUTS = [
    Layout(dp_replicate=2, micro_batch=2),
    Layout(tp=2, micro_batch=4),
    Layout(pp=2, tp=2, micro_batch=4),
    Layout(cp=2, tp=2, micro_batch=8),
    Layout(cp=2, micro_batch=4),
    Layout(pp=2, stages_per_rank=2, schedule="interleaved", micro_batch=2),
    Layout(pp=2, stages_per_rank=2, schedule="zero_bubble", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, dp_shard=2, checkpointing="full"),
    Layout(dp_shard=2, tp=2, micro_batch=4, checkpointing="selective", checkpointing_freq=3),
    *(
        Layout(pp=2, stages_per_rank=2, schedule=schedule, reshard_after_forward=False, **fields)  # type: ignore[arg-type]
        for schedule in ("zbv", "dualpipev")
        for fields in ({"dp_shard": 2}, {"tp": 2}, {"checkpointing": "full"})
    ),
    Layout(tp=2, micro_batch=4, checkpointing="selective"),
    Layout(cp=4, micro_batch=4),
    Layout(cp=4, cp_method="ring", micro_batch=4),
    Layout(cp=8, cp_method="ring", micro_batch=8),
    Layout(cp=2, cp_method="ring", tp=2, dp_shard=2, checkpointing="full"),
    Layout(cp=2, cp_method="ring", pp=2, micro_batch=2),
    Layout(dp_replicate=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
]
LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LAYOUTS]
MANUAL_LAYOUTS = [replace(layout, global_batch=BATCH) for layout in MANUAL_LAYOUTS]
LONG_LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LONG_LAYOUTS]
