"""Devices and results of acceptances."""

from dataclasses import replace

from sweeper.commands.accept.experiments import Reading
from sweeper.commands.accept.judge import Judgement
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.preflight.devices import planned_target

TEST = "bf16 products sustained"


def gpus(per_node: int, nodes: int, hardware: str = "h100") -> Target:
    planned = planned_target(catalogue()[hardware], per_node)
    return replace(planned, nodes=(replace(planned.nodes[0], gpus=per_node, cpus=8),) * nodes)


def readings(*rates: float, test: str = TEST) -> list[Reading]:
    return [Reading(test, "device", f"n GPU {n}", ("n",), "TFLOP/s", rate) for n, rate in enumerate(rates)]


def verdicts(judgements: list[Judgement]) -> list[str]:
    return [judgement.verdict.value for judgement in judgements]
