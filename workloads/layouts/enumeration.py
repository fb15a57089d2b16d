"""Enumerate a job's layouts for a number of GPUs: all possible degrees, combined with the trainer's other options."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import LESS_LAYERS, V_SCHEDULES, Checkpointing, Job, Layout, vary
from workloads.layouts.rules import Site, find_violation, rules_of
from workloads.layouts.trainers import OWN, find_trainer

MAX_MICRO_BATCH = 16  # sequences; larger micro-batches do not improve GPU utilization
MAX_STAGES_PER_RANK = 16


@dataclass(frozen=True)
class Family:
    """Layouts that differ only in options that trade memory for time."""

    template: Layout  # one layout of the family
    shards: tuple[int, ...]  # the values of `dp_shard`, largest first; the other data-parallel ranks are replicas
    checkpointings: tuple[Checkpointing, ...]  # the values of `checkpointing`, fastest first
    reshardings: tuple[bool, ...]  # the values of `reshard_after_forward`

    def __len__(self) -> int:
        return len(self.shards) * len(self.checkpointings) * len(self.reshardings)

    def list_layouts(self, checkpointing: Checkpointing, reshard: bool) -> Iterator[Layout]:
        """Yield the layouts with this checkpointing and resharding, starting with the largest number of shards."""
        for shards in self.shards:
            degrees = {"dp_shard": shards, "dp_replicate": self.template.dp // shards}
            yield vary(self.template, **degrees, checkpointing=checkpointing, reshard_after_forward=reshard)


def list_families(
    job: Job, cluster: Cluster, options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]
) -> Iterator[Family]:
    """Yield a job's valid layouts, grouped by family. Only the global batch of the job's own layout is used.

    `options` are the values to try for `schedule`, `sharding`, `checkpointing` (fastest first) and
    `reshard_after_forward`; `fixed` are the layout fields with a single value.
    """
    space, site = _Space(job, cluster, options, fixed), Site.of(cluster)
    other_rules = [rule for rule in rules_of(job.trainer) if not rule.is_tradable]
    expert_rules = [rule for rule in other_rules if rule.name == "ep divides the experts"]
    tradable_rules = [rule for rule in rules_of(job.trainer) if rule.is_tradable]
    checkpointings = space.values("checkpointing")
    for template, shards, reshardings in space.list_templates():
        stages = [vary(template, last_stage_less_layers=less) for less in space.list_less(template)]
        stages = [layout for layout in stages if not find_violation(vary(job, layout=layout), site, other_rules)]
        if not stages:
            continue
        template = stages[0]
        if template.ep > 1:  # some trainers divide experts only among ranks that share a copy's states
            divided = (vary(template, dp_shard=n, dp_replicate=template.dp // n) for n in shards)
            valid = (one for one in divided if not find_violation(vary(job, layout=one), site, expert_rules))
            shards = tuple(layout.dp_shard for layout in valid)
        pairs = list(product(checkpointings, reshardings))
        if tradable_rules:
            layouts = [vary(template, checkpointing=c, reshard_after_forward=reshard) for c, reshard in pairs]
            broken = [find_violation(vary(job, layout=layout), site, tradable_rules) for layout in layouts]
            pairs = [pair for pair, violation in zip(pairs, broken, strict=True) if not violation]
        if pairs:
            kept, reshards = (tuple(dict.fromkeys(values)) for values in zip(*pairs, strict=True))
            if pairs[0] != (template.checkpointing, template.reshard_after_forward):
                template = vary(template, checkpointing=kept[0], reshard_after_forward=reshards[0])
            for less in [layout.last_stage_less_layers for layout in stages]:
                yield Family(vary(template, last_stage_less_layers=less), shards, kept, reshards)


@dataclass(frozen=True)
class _Space:
    job: Job
    cluster: Cluster
    options: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]

    def list_templates(self) -> Iterator[tuple[Layout, tuple[int, ...], tuple[bool, ...]]]:
        """Yield one layout per family, with the family's values of `dp_shard` and `reshard_after_forward`."""
        base = replace(self.job.layout, **{**self.fixed, "checkpointing": self.values("checkpointing")[0]})
        for dp, tp, cp, pp in self._list_degrees():
            for shards, is_sharded in self._list_shards(dp, cp):
                reshardings = self.values("reshard_after_forward")
                if not is_sharded:
                    reshardings = (True,) if self.fixed.get("reshard_after_forward", True) else ()
                for choices in self._list_choices(dp, pp, is_sharded) if reshardings else ():
                    choices |= {"dp_shard": shards[0], "dp_replicate": dp // shards[0]}
                    choices |= {"reshard_after_forward": reshardings[0]}
                    yield vary(base, tp=tp, cp=cp, pp=pp, **choices), shards, reshardings

    def _list_degrees(self) -> Iterator[tuple[int, int, int, int]]:
        model, gpus, divides = self.job.model, self.cluster.gpus, find_trainer(self.job.trainer).divides_kv_heads
        for pp in self._degree("pp", divisors(gpus)):
            if pp > model.layers:
                continue
            for tp in self._degree("tp", divisors(gpus // pp)):
                if tp > self.cluster.topology.gpus_per_domain or model.heads % tp or not divides(model.kv_heads, tp):
                    continue
                for cp in self._degree("cp", divisors(gpus // pp // tp)):
                    if cp == 1 or self.job.sequence_length % (2 * cp) == 0:
                        yield gpus // pp // tp // cp, tp, cp, pp

    def _list_shards(self, dp: int, cp: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        counts = self._degree("dp_shard", divisors(dp)[::-1])
        counts = [shards for shards in counts if self.fixed.get("dp_replicate", dp // shards) == dp // shards]
        for is_sharded in (True, False):
            if some := tuple(shards for shards in counts if (shards * cp > 1) == is_sharded):
                yield some, is_sharded

    def _list_choices(self, dp: int, pp: int, is_sharded: bool) -> Iterator[dict[str, Any]]:
        sequences, remainder = divmod(self.job.layout.global_batch, dp)
        if remainder or not sequences:
            return
        most = sequences if "micro_batch" in self.fixed else MAX_MICRO_BATCH
        micro_batches = [size for size in self._degree("micro_batch", divisors(sequences)) if size <= most]
        experts, shardings = self.job.model.experts, self.values("sharding")
        if not is_sharded:  # this project's trainer uses FSDP here too (`Layout.uses_fsdp`)
            has_fsdp = self.job.trainer == OWN and (self.job.state == "fp32" or dp > 1)
            shardings = ("fsdp2" if has_fsdp and self.fixed.get("sharding") != "none" else "none",)
        has_degrees = experts and "ep" not in find_trainer(self.job.trainer).without
        for ep in self._degree("ep", divisors(experts) if has_degrees else (1,)):
            for sharding in shardings:
                for pipeline in self._list_pipelines(pp):
                    choices = {"ep": ep, "sharding": sharding, **pipeline}
                    yield from ({**choices, "micro_batch": size} for size in micro_batches)

    def _list_pipelines(self, pp: int) -> Iterator[dict[str, Any]]:
        """Yield schedules and numbers of stages. If the layers do not divide among the ranks, the first and the last of
        interleaved stages have one layer fewer, or the last has as many fewer as are needed."""
        if pp == 1:
            if self.fixed.get("schedule", "1f1b") == "1f1b" and self.fixed.get("stages_per_rank", 1) == 1:
                yield {"schedule": "1f1b", "stages_per_rank": 1}
            return
        total, given = self.job.model.layers, tuple(self.fixed.get(name, 0) for name in LESS_LAYERS)
        is_given = not {*LESS_LAYERS}.isdisjoint({*self.fixed, *find_trainer(self.job.trainer).runs})
        ends = given if is_given or total % pp == 0 else (0, -total % pp) if (total + 2) % pp else (1, 1)
        for schedule in self.values("schedule"):
            is_single = schedule == "1f1b" or (schedule == "zero_bubble" and self.job.trainer == "primus")
            less = ends if schedule == "interleaved" else given
            layers = total + sum(less)
            layers = layers // pp if layers > 0 and layers % pp == 0 else 1
            several = [count for count in divisors(layers) if 1 < count <= MAX_STAGES_PER_RANK]
            counts = [1] if is_single else [2] if schedule in V_SCHEDULES else several
            pipeline = {"schedule": schedule, **dict(zip(LESS_LAYERS, less, strict=True))}
            yield from ({**pipeline, "stages_per_rank": n} for n in self._degree("stages_per_rank", counts))

    def list_less(self, layout: Layout) -> Iterator[int]:
        """Yield the layout's `last_stage_less_layers`, and the value with which all other stages are equal and the
        slowest one takes the least time, by the weights that a token is multiplied by. Those of a head, which is in
        bf16, count twice if blocks are in fp8."""
        yield layout.last_stage_less_layers
        model, pp, name = self.job.model, layout.pp, "last_stage_less_layers"
        if pp == 1 or layout.schedule != "1f1b" or name in {*self.fixed, *find_trainer(self.job.trainer).runs}:
            return
        block = model.mixer_weights(model.layers - 1) + model.active_mlp_weights(model.layers - 1)
        head = model.head_weights * (1 if self.job.precision in ("bf16", "fp16", "fp32") else 2) / block
        layers, extra = model.layers + layout.first_stage_less_layers, model.prediction_layers * (1 + head) + head
        counts = (0, *range(-layers % pp or pp, (layers - 1) // (pp - 1) + 1, pp))
        if best := min(counts, key=lambda less: (layers + less) / pp + max(0.0, extra - less)):
            yield best

    def values(self, name: str) -> tuple[Any, ...]:
        return (self.fixed[name],) if name in self.fixed else tuple(self.options[name])

    def _degree(self, name: str, values: Sequence[int]) -> Sequence[int]:
        return [value for value in values if value == self.fixed[name]] if name in self.fixed else values


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
