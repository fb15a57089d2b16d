"""Whether the layouts of a plan fit in memory."""

import re

import pytest

from sweeper.commands.plan.answer import answer
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import read_request
from sweeper.commands.plan.side_by_side import compare_hardware
from sweeper.commands.plan.text import head_lines, layouts_table, parts_table, tail_lines
from workloads.estimator.search import bound_gib


def test_twice_the_memory_lets_layouts_fit_that_did_not() -> None:
    words = ["model=llama3_8b", "hardware=a100_40gb", "gpus=8", "tp=1", "cp=1", "pp=1", "micro_batch=1"]
    small = answer(read_request(words))
    larger = small.alternatives["twice the memory"]
    assert larger.estimate.memory.total_gib > 40 > small.best.estimate.memory.total_gib
    assert larger.estimate.step.total_s < small.best.estimate.step.total_s


FULL = ["model=qwen3_30b_a3b", "hardware=b200", "gpus=64", "dp_shard=64", "micro_batch=8", "checkpointing=selective"]
PAIR = ["model=llama3_8b", "hardware=h100", "gpus=2", "global_batch=16", "dp_shard=2", "checkpointing=selective"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([*PAIR, "micro_batch=1"], 0, "fits      up to 7"),
        ([*PAIR, "micro_batch=8"], 1, "no        gpus=2: no layout fits"),
        # 157.4 GiB estimated, and 15% of band: no run of this project's trainer on a B200, or on 64 GPUs, was measured.
        (
            [*FULL, "ep=1", "reshard_after_forward=false"],
            1,
            "no        up to 181.0 GiB (estimate 157.4) of 173.0 usable",
        ),
        (FULL, 0, "fits      up to 118.9 GiB (estimate 103.4) of 173.0 usable: dp_shard=64"),
    ],
)
def test_whether_a_layout_fits_is_an_exit_code(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main([*words, "fits=true"])
    assert ended.value.code == code
    assert capsys.readouterr().out.startswith(said)
    if said.startswith("no        up"):  # a given layout is planned all the same, with a warning
        assert any("no layout's bound of memory does" in line for line in tail_lines(answer(read_request(words))))


def test_one_bound_decides_what_is_recommended_what_fits_and_what_is_left() -> None:
    request = read_request(FULL[:3])
    planned = answer(request)
    problem, best = planned.problem, planned.result.best
    bounds = [bound_gib(candidate.estimate.memory, problem.job, problem.cluster) for candidate in best]
    assert max(bounds) <= problem.cluster.usable_gib == pytest.approx(0.97 * 178.35)
    rows = compare_hardware(request, ["b200"])[0]
    assert rows[0][6] == f"{0.97 * 178.35 - 1.15 * best[0].estimate.memory.needed_gib:.0f}"
    assert layouts_table(planned)[1][0][3] == f"{bounds[0]:.0f}"
    small = read_request(["model=qwen3_30b_a3b", "hardware=h100", "gpus=8", "trainer=megatron", "tp=2", "cp=1"])
    unsure = answer(small)
    marked = [compare_hardware(small, ["h100"])[0][0], layouts_table(unsure)[1][0]]  # only its estimate fits
    assert all("(may not fit)" in row[-1] for row in marked) and float(marked[0][6]) < 0
    of_search = re.compile(r"searched  ([\d,]+) valid layouts: ([\d,]+) do not fit(?:, ([\d,]+) may not fit)?")
    counts = [
        [int(text.replace(",", "")) for text in match.groups() if text]
        for match in (next(filter(None, map(of_search.match, head_lines(one)))) for one in (planned, unsure))
    ]
    assert len(counts[0]) == 2 and counts[1][0] == counts[1][1] + counts[1][2] > counts[1][1]


def test_the_parts_of_the_memory_add_up_to_the_bound() -> None:
    planned = answer(read_request(["model=llama3_8b", "hardware=b200", "gpus=8"]))
    _, rows = parts_table(planned)
    *parts, (name, total) = [(row[3], float(row[4])) for row in rows if row[3]]
    assert name == "at most" and sum(gib for _, gib in parts) == pytest.approx(total, abs=0.05 * len(parts))
    bound = bound_gib(planned.best.estimate.memory, planned.problem.job, planned.problem.cluster)
    assert total == pytest.approx(bound, abs=0.05)
    assert "error_band" in dict(parts) and "reserved" not in dict(parts)
