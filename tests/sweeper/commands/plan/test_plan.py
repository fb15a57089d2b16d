"""`python -m sweeper plan`: the layouts that it finds, and its figures."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import SCORED, read_runs
from sweeper.commands.plan.answer import answer, search, tokens_of_a_day
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import TOKENS_PER_STEP, build_problem, default_batch, read_request
from sweeper.commands.plan.text import head_lines, layouts_table, tail_lines
from sweeper.common.format import round_to_band
from sweeper.preflight.clusters import build_cluster
from sweeper.preflight.corrections import Correction, Place, keep
from tests.support.planner import SMALL, flatten
from workloads.api.errors import UserInputError
from workloads.api.registry import load
from workloads.estimator.pipeline import stage_layers
from workloads.estimator.questions import explain_slower
from workloads.estimator.search import bound_gib, find_layouts
from workloads.estimator.step import estimate_job
from workloads.layouts.enumeration import list_families
from workloads.layouts.layout import Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.hugging_face import load_model


@pytest.mark.parametrize(("device", "is_measured"), [("h100", True), ("h200", True), ("b200", False)])
def test_a_plan_says_how_many_runs_of_its_trainer_and_device_are_measured(device: str, is_measured: bool) -> None:
    runs = [run for path in SCORED for run in read_runs(path)[0]]
    theirs = [run for run in runs if run.pair == ("own", device) and run.step_s and run.family == "dense"]
    planned = answer(read_request(["model=llama3_8b", f"hardware={device}", "gpus=2", "tp=1", "pp=1", "cp=1"]))
    (band,) = (line for line in tail_lines(planned) if line.startswith("band "))
    assert bool(theirs) == is_measured == ("mean error of own on " in band)
    assert is_measured != any(f"of trainer=own on {device}" in line for line in head_lines(planned))
    if is_measured:
        found = re.search(r"; the mean error of own on \w+ is ([\d.]+)% \(measured runs: (\d+), most GPUs: 2\)", band)
        assert found and int(found[2]) == len(theirs) and 1 < float(found[1]) < 5
    assert not any("efficiency of own" in line for line in tail_lines(planned))


def test_a_plan_has_fewer_layers_beside_a_large_output_layer() -> None:
    words = ["model=deepseek_v3", "hardware=h800", "gpus=2048", "trainer=megatron", "dispatcher=deepep", "tp=1"]
    words += ["pp=16", "ep=64", "dp_shard=128", "cp=1", "sequence_length=4096", "checkpointing=full"]
    words += ["global_batch=15360"]  # DeepSeek-V3's
    problem = build_problem(read_request(words))
    best = search(problem).best[0]
    even = estimate_job(replace(problem.job, layout=replace(best.layout, last_stage_less_layers=0)), problem.cluster)
    sizes = [len(layers) for layers in stage_layers(61, 16, *best.layout.less_layers)]
    assert best.layout.last_stage_less_layers == 3 and sizes == [4] * 15 + [1]
    assert 1.25 < even.step.total_s / best.estimate.step.total_s < 1.3
    first, last = best.estimate.stages[0], best.estimate.stages[-1]
    assert first.activations > even.stages[0].activations and last.parameters < first.parameters
    with pytest.raises(UserInputError, match="61 layers do not divide into 16 stages"):
        search(build_problem(read_request([*words, "last_stage_less_layers=0"])))


@pytest.mark.parametrize("gpus", [1, 6, 48, 72, 4096])
def test_the_batch_is_a_multiple_of_the_gpus_of_about_four_million_tokens(gpus: int) -> None:
    batch = default_batch(8192, gpus)
    assert (batch % gpus == 0 and batch * 8192 >= TOKENS_PER_STEP > (batch - gpus) * 8192) or batch == gpus


def test_a_given_layout_is_compared_with_the_fastest_one(capsys: pytest.CaptureFixture[str]) -> None:
    given = answer(read_request([*SMALL, "tp=8"]))
    assert {candidate.layout.tp for candidate in given.result.best} == {8}
    assert given.faster is not None
    assert given.faster.estimate.step.total_s < given.best.estimate.step.total_s
    assert "(tensor_parallel)." in explain_slower(given.best.estimate.step, given.faster.estimate.step)

    assert COMMAND.run([*SMALL, "tp=8"]) == 0
    printed = capsys.readouterr().out
    assert "given     cp=1 micro_batch=1 tp=8" in printed
    assert "slower    by" in printed and "Tensor parallel ranks exchange activations in every block" in printed


def test_the_fewest_gpus_for_a_rate_reach_it_and_fewer_do_not() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=8", "tp=1", "cp=1", "pp=1", "micro_batch=1"]
    wanted = 20e9
    found = answer(read_request([*words, f"tokens_per_day={wanted}"]))
    gpus = found.problem.cluster.gpus
    assert tokens_of_a_day(found.best.estimate) >= wanted and gpus > 8
    fewer = search(build_problem(replace(read_request(words), gpus=gpus - 8)), keep=1).best[0]  # a node less
    assert tokens_of_a_day(fewer.estimate) < wanted and max(found.rates) == gpus
    least = answer(read_request([*words[:2], "gpus=37", *words[3:], "tokens_per_day=1e9"]))  # in whole nodes
    assert least.problem.cluster.gpus == 40


def test_every_layout_searched_is_unfit_slower_or_among_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """The search estimates more layouts than it keeps: those count as slower too."""

    def read_counts(*words: str) -> list[int]:
        assert COMMAND.run([*SMALL, *words]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("searched")]
        return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]

    total, unfit, slower, best = read_counts()
    assert total == unfit + slower + best and best == 20
    total, unfit = read_counts("pp=1", "tp=1", "dp_shard=8", "sharding=fsdp2")
    assert unfit < total < 20  # all that fit are shown


def test_context_parallelism_beyond_measured_runs_is_marked() -> None:
    planned = answer(read_request([*SMALL[:3], "cp=4", "tp=1", "pp=1"]))
    assert "(cp beyond measured runs)" in layouts_table(planned)[1][0][-1]
    assert any("tokens on a context rank" in line for line in tail_lines(planned))


def test_the_fewest_gpus_for_a_rate_keep_a_given_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "hardware=h100", "tp=1", "cp=1", "pp=1", "micro_batch=1", "tokens_per_day=20e9"]
    assert COMMAND.run([*words, "global_batch=96"]) == 0
    printed = capsys.readouterr().out
    assert "96 sequences of" in printed and "reached   by 24 GPUs" in printed and "too few are 16 GPUs\n" in printed

    at_least = answer(read_request([*words, "global_batch=96", "gpus=48"]))
    assert at_least.problem.cluster.gpus == 48 and list(at_least.rates) == [48]
    assert "slow end; gpus=48 is the fewest that were tried" in "\n".join(head_lines(at_least))
    with pytest.raises(UserInputError, match=r"96 GPUs are the fastest and reach .*; a larger global_batch may help"):
        answer(read_request([*words[:-1], "tokens_per_day=900e9", "global_batch=96"]))


def test_stages_of_given_sizes_change_what_their_ranks_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "pp=2", "tp=1", "stages_per_rank=1"]
    even = answer(read_request([*words, "last_stage_less_layers=0"])).best
    given = answer(read_request([*words, "last_stage_less_layers=12"])).best  # 22 and 10 layers
    assert given.estimate.step.total_s > 1.2 * even.estimate.step.total_s
    same = search(
        build_problem(read_request([*words, "first_stage_less_layers=1", "last_stage_less_layers=1"])), keep=1
    )
    assert same.best[0].estimate == even.estimate
    assert COMMAND.run([*words, "last_stage_less_layers=12"]) == 0
    assert "last_stage_less_layers=12" in capsys.readouterr().out


ROUNDED = "1152.3 0.08 1,150|1152.3 0.2 1,200|57.46 0.08 57|7.305 0.08 7.3|401.2 0.08 400|0.0123456 0.08 0.0123"
ROUNDED += "|71.23 0.1 71|-4808.0 0.08 -4,800|22.8 0.59 23|1980.0 0.59 2,000|0.0 0.1 0"


@pytest.mark.parametrize(("value", "error", "text"), [case.split() for case in ROUNDED.split("|")])
def test_figures_have_no_more_digits_than_their_band_allows(value: str, error: str, text: str) -> None:
    assert round_to_band(float(value), float(error)) == text


@pytest.mark.parametrize(
    ("trainer", "measured_name", "workload"), [("own", "parallel", "parallel"), ("torchtitan", "torchtitan", "command")]
)
def test_what_sweeps_measured_on_such_a_cluster_corrects_its_plan_alone(
    trainer: str,
    measured_name: str,
    workload: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "tp=1", "pp=1", f"trainer={trainer}"]
    planned = answer(read_request(words)).best.estimate
    place = Place("h100", measured_name, 8, 8, "nodes of 8", load(workload).benchmark_version)
    keep(tmp_path, Correction(place, 1.25, 7, 1.1, 1.3, "2026-11-20"))
    measured = answer(read_request(words))
    assert measured.best.estimate.step.total_s == pytest.approx(1.25 * planned.step.total_s)
    assert COMMAND.run(words) == 0
    assert f"measured  step times x 1.25, the median of 7 layouts of {measured_name}" in capsys.readouterr().out
    others = (["gpus=16", f"trainer={trainer}"], ["gpus=8", "trainer=nemo"])
    assert all(build_problem(read_request([*SMALL[:2], *other])).correction is None for other in others)


SMALL_SPACES: list[tuple[str, str, str, int, int, dict[str, Any]]] = [
    ("llama3_8b", "own", "h100", 8, 16, {"cp": 1}),
    ("llama3_70b", "torchtitan", "h200", 16, 32, {"cp": 1, "tp": 8}),
    ("llama3_70b", "own", "h100_96gb", 32, 64, {"reshard_after_forward": True, "cp": 1, "micro_batch": 1, "tp": 4}),
    ("qwen3_30b_a3b", "megatron", "h100", 8, 16, {"cp": 1, "tp": 2, "micro_batch": 1}),
    ("llama3_8b", "deepspeed", "a100", 12, 24, {}),
]


@pytest.mark.parametrize(("model", "trainer", "device", "gpus", "batch", "fixed"), SMALL_SPACES)
def test_pruning_keeps_the_layouts_that_an_estimate_of_each_one_puts_first(
    model: str, trainer: str, device: str, gpus: int, batch: int, fixed: dict[str, Any]
) -> None:
    layout = Layout(global_batch=batch)
    template, target = Job(load_model(model), layout, 4096, trainer), build_cluster(device, None, gpus)
    options, fixed = TRAINERS[trainer].search, {**TRAINERS[trainer].fixed_degrees(), **fixed}
    estimates = [
        estimate_job(replace(template, layout=layout), target)
        for layout in flatten(list_families(template, target, options, fixed))
    ]
    sizes = [bound_gib(e.memory, template, target) for e in estimates]
    if model == "qwen3_30b_a3b":  # only estimates fit, no bound does
        assert min(sizes) > target.usable_gib
        sizes = [e.memory.needed_gib for e in estimates]
    fitting = sorted(e.step.total_s for e, size in zip(estimates, sizes, strict=True) if size <= target.usable_gib)
    assert 0 < len(fitting) < len(estimates)
    for kept in (1, 20):
        result = find_layouts(template, target, options, fixed, kept)
        assert [found.estimate.step.total_s for found in result.best] == pytest.approx(fitting[:kept])
        assert result.estimated + result.too_large + result.slower == len(estimates)
        assert result.estimated < len(fitting) or len(fitting) <= kept
