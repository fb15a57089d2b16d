"""Plans of mixtures of experts: exchange, imbalance and routing."""

import re

import pytest

from sweeper.commands.plan.answer import answer, search
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import build_problem, read_request
from sweeper.commands.plan.text import tail_lines


def test_experts_of_our_trainer_are_planned_with_its_own_exchange() -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=8"]
    jobs = [build_problem(read_request([*words, f"trainer={name}"])).job for name in ("own", "megatron")]
    assert [job.dispatcher for job in jobs] == ["allgather", "alltoall"]


def test_the_way_of_tokens_to_experts_and_their_imbalance_change_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=64", "trainer=megatron", "ep=16", "tp=1", "pp=1", "cp=1"]

    def step_s(*more: str) -> float:
        return search(build_problem(read_request([*words, *more])), keep=1).best[0].estimate.step.total_s

    usual, deepep, uneven = step_s(), step_s("dispatcher=deepep"), step_s("expert_imbalance=1.5")
    assert step_s("dispatcher=deepep", "expert_overlap=true") < deepep < usual < uneven
    assert COMMAND.run([*words, "expert_imbalance=1.5"]) == 0
    printed = capsys.readouterr().out
    assert "experts   dispatcher=alltoall expert_overlap=false expert_imbalance=1.5" in printed
    assert "forced balance is assumed" not in printed
    (share,) = re.findall(
        r"expert_imbalance=1.5 has (0\.\d\d) of the rate of forced balance", " ".join(printed.split())
    )
    assert float(share) < 0.95


def test_imbalance_is_limited_by_the_number_of_ranks_that_divide_experts() -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=64", "micro_batch=1", "checkpointing=full", "tp=1", "cp=1"]

    def step_s(*more: str) -> float:
        return search(build_problem(read_request([*words, *more])), keep=1).best[0].estimate.step.total_s

    assert step_s("ep=1", "expert_imbalance=4") == step_s("ep=1", "expert_imbalance=1.5") > step_s("ep=1")
    assert step_s("ep=2", "expert_imbalance=1e6") == step_s("ep=2", "expert_imbalance=2") > step_s("ep=2")


@pytest.mark.parametrize(("batch", "length", "is_explained"), [(8, 1024, True), (64, 4096, False)])
def test_unequal_loads_that_the_host_hides_are_explained(batch: int, length: int, is_explained: bool) -> None:
    words = ["model=qwen3_30b_a3b", "hardware=b200", "gpus=8", "ep=8", "trainer=megatron"]
    request = read_request([*words, f"global_batch={batch}", f"sequence_length={length}"])
    (line,) = (line for line in tail_lines(answer(request)) if line.startswith("routing"))
    assert (
        "the host takes 7.1 ms to launch a block, longer than the busiest GPU computes up to" in line
    ) == is_explained
