"""`python -m sweeper plan` for several GPUs, and for a number of days, a rate or a cost."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sweeper.commands.plan.answer import answer, find_problem, plan_training, search
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import build_problem, read_request
from sweeper.commands.plan.side_by_side import HEADING, SHOWN_COLUMNS, Planned, compare_hardware, list_open
from sweeper.commands.plan.text import head_lines, list_sections, tail_lines
from sweeper.common.format import show_range
from sweeper.pages.terminal import draw
from workloads.api.contract import BandEnds
from workloads.api.errors import UserInputError
from workloads.estimator.questions import TrainingRun


def test_gpus_are_compared_for_the_same_tokens_the_fewest_gpu_hours_first() -> None:
    words = ["model=llama3_8b", "hardware=h100,rtx4090,b200", "gpus=8", "tp=1", "pp=1", "cp=1", "micro_batch=1"]
    request = read_request([*words, "train_tokens=1e12", "trainer=own", "global_batch=256"])
    rows, lines = compare_hardware(request, ["h100", "rtx4090", "b200"])
    alone = {name: dict(list_sections(answer(replace(request, hardware=name)))) for name in ("b200", "h100")}
    counts = {name: len(lines.get("unsure", []) + lines.get("far", [])) for name, lines in alone.items()}
    assert counts["b200"] > counts["h100"] == 0
    assert f"{counts['b200']} warning: b200 {counts['b200']}." in lines[-1]
    assert [row[0] for row in rows] == ["b200", "h100", "rtx4090"]
    assert "no layout fits" in rows[2][-1] and rows[2][1] == "—"
    assert f"none      {rows[2][0]}: {rows[2][-1]}" in lines  # also where the terminal is too narrow for the column
    hours, energy = (float(rows[1][HEADING.index(name)].replace(",", "")) for name in ("GPU-hours", "MWh"))
    assert energy == pytest.approx(hours * 700 / 1e6, rel=0.3)  # both are rounded to the band
    for row, price in zip(rows[:2], (8.5, 4.5), strict=True):  # each GPU has its own
        shown = [row[HEADING.index(name)] for name in ("GPU-hours", "cost")]
        hours, cost = (float(text.split(" (")[0].replace(",", "")) for text in shown)
        assert cost == pytest.approx(price * hours, rel=0.05)  # each has the digits of its band
        assert f"price     {row[0]}: {price} USD per GPU-hour, assumed: Nebius price list" in "\n".join(lines)
        assert row[8] == "by own, bf16, 256 x 8,192 tokens a step"


def test_a_price_of_the_request_replaces_those_of_the_gpus() -> None:
    words = ["model=llama3_8b", "gpus=8", "tp=1", "pp=1", "cp=1", "micro_batch=1", "train_tokens=1e12"]
    names = ["mi355x", "h100"]  # the first has no price
    rows, lines = compare_hardware(read_request([*words, "hardware=mi355x,h100", "price_per_hour=2"]), names)
    assert all(row[3] != "—" for row in rows) and f"price     {names[0]}: 2 per GPU-hour" in lines
    rows, lines = compare_hardware(read_request([*words, "hardware=mi355x,h100"]), names)
    assert [row[3] == "—" for row in rows] == [True, False]  # in the order of GPU-hours
    with pytest.raises(UserInputError, match="max_cost=9: needs price_per_hour=, mi355x has no known price"):
        answer(read_request([*words, "hardware=mi355x", "max_cost=9"]))


def test_a_comparison_says_what_its_bands_leave_open() -> None:
    words = ["model=llama3_8b", "hardware=h100,h200,b200", "gpus=8", "tp=1", "pp=1", "cp=1", "micro_batch=1"]
    request = read_request([*words, "train_tokens=1e12"])
    rows, lines = compare_hardware(replace(request, days=145.0), names := ["h100", "h200", "b200"])
    days = {row[0]: tuple(map(int, re.findall(r"\d+", row[2]))) for row in rows}
    assert days["h100"][0] < 145 < days["h100"][2]  # by the middle of the band, not by its end
    text = "\n".join(lines)
    late = ", ".join(f"{row[0]} {row[2]}" for row in rows if days[row[0]][2] > 145)
    assert f"days      145 is met by the middle of the band, not by its slow end: {late}" in text
    priced = replace(request, max_cost=56000.0, price_per_hour=2.0)
    rows, lines = compare_hardware(priced, names[:1])
    assert f"max_cost  56000 is met by the middle of the band, not by its slow end: h100 {rows[0][3]}" in lines
    assert "order     by cost; open between " in text and "far       b200: far from any measured run" in text
    assert "trainer   own by default; another one" in text
    text = "\n".join(compare_hardware(replace(request, trainer="megatron", days=900.0), names)[1])
    assert "trainer   " not in text and "days      " not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["days=0.001"],
            r"^days=0.001 .*: takes 60\d,\d{3} GPUs .* 65,536 are planned, which reach at best days=0\.0091",
        ),
        (["tokens_per_day=1e15"], r"at most 65,536 are planned, which reach at best tokens_per_day=1\.09e\+14$"),
        (["days=1", "global_batch=8"], r"8 GPUs are the fastest and reach days=[\d.]+; a larger global_batch may help"),
        (["days=9", "failures_per_gpu_day=100"], r"no number of GPUs can be planned\. failures_per_gpu_day=100: "),
        (["days=9", "max_cost=100"], r"max_cost=100: train_tokens=1e\+12 on \d+ GPUs cost "),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused_with_one_that_can(words: list[str], message: str) -> None:
    with pytest.raises(UserInputError, match=message) as refusal:
        answer(read_request([*FIXED, *words]))
    assert "\n" not in str(refusal.value)


def test_a_cost_that_is_too_low_is_refused_with_the_tokens_that_it_pays_for() -> None:
    with pytest.raises(UserInputError, match="max_cost pays for about train_tokens=") as refusal:
        answer(read_request([*FIXED, "gpus=8", "max_cost=100"]))
    found = re.search(r"cost ([\d,]+) .* train_tokens=([\d.e+]+),", str(refusal.value))
    assert found
    cost, tokens = float(found[1].replace(",", "")), float(found[2])
    assert tokens == pytest.approx(1e12 * 100 / cost, rel=0.06)  # of two digits
    assert answer(read_request([*FIXED, "gpus=8", "max_cost=100", f"train_tokens={0.9 * tokens}"])).training.cost


def test_gpus_are_refused_by_name_if_their_reasons_differ() -> None:
    with pytest.raises(UserInputError) as refusal:
        words = [*FIXED[2:], "model=llama3_8b", "hardware=h100,h200,b200", "days=0.001"]
        compare_hardware(read_request(words), ["h100", "h200", "b200"])
    assert re.findall(r"^([\w, ]+): days=0.001", str(refusal.value), re.MULTILINE) == ["h100, h200", "b200"]


def test_a_narrow_terminal_shows_what_the_question_is_about() -> None:
    rows, _ = compare_hardware(read_request([FIXED[0], *FIXED[2:], "gpus=8", "hardware=h100,b200"]), ["h100", "b200"])
    fits = {"GPUs": 60, "days": 60, "cost": 60, "tokens/s per GPU": 80, "GPU-hours": 120, "MWh": 120, "layout": 200}
    for width in (60, 80, 120, 200):
        table = draw(HEADING, rows, SHOWN_COLUMNS, width)
        shown = [column.header for column in table.columns]
        assert all(name in shown for name, needed in fits.items() if needed <= width)
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        assert max(map(len, console.file.getvalue().splitlines())) <= width  # type: ignore[attr-defined]


def test_the_ranges_are_those_of_the_band_of_rates() -> None:
    ends = BandEnds(0.5, 0.3)
    assert (show_range(100.0, ends, is_rate=True), show_range(100.0, ends)) == ("100 (50 to 130)", "100 (77 to 200)")
    narrow = show_range(136_000.0, BandEnds(0.1, 0.06), is_rate=True)
    assert narrow == "136,000 (122,000 to 144,000)"  # with the digits of each: 140,000 (122,000 to 140,000)


@pytest.mark.parametrize("days", [30.04, 29.96, 146.2, 147.4])
def test_a_figure_is_shown_on_the_side_of_its_limit_on_which_it_is_judged(days: float) -> None:
    for limit in (30.0, 147.0, days / 0.9 + 0.001):  # the last is near the slow end
        figures = map(float, re.findall(r"[0-9.]+", show_range(days, BandEnds(0.1, 0.05), limit)))
        for shown, exact in zip(figures, (days, days / 1.05, days / 0.9), strict=True):
            assert (shown <= limit) == (exact <= limit), (shown, exact, limit)


def test_a_gpu_on_which_a_run_may_not_fit_follows_those_on_which_it_fits() -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100,h20", "gpus=8", "trainer=megatron", "tp=2", "cp=1"]
    rows, lines = compare_hardware(read_request([*words, "price_per_hour=2"]), ["h100", "h20"])
    assert [(row[0], float(row[6]) < 0) for row in rows] == [("h20", False), ("h100", True)]
    assert "memory    it may not fit on h100; GPUs on which it fits come first" in lines


def test_the_order_is_open_too_where_a_wide_band_overlaps_one_beyond_its_neighbor() -> None:
    request = read_request(["model=llama3_8b", "hardware=h100,h200,b200", "gpus=8", "trainer=own"])
    plans = [
        (cost, Planned(name, TrainingRun(1.0, cost / 24, cost, cost, 0.0, 0.0), ends, is_far=False, may_not_fit=False))
        for name, cost, ends in (
            ("h100", 100.0, BandEnds(0.1, 0.05)),
            ("h200", 125.0, BandEnds(0.1, 0.05)),
            ("b200", 170.0, BandEnds(0.2, 0.57)),
        )
    ]
    (line,) = list_open(request, plans)
    assert line == "order     by cost; open between h100 and b200, h200 and b200: their bands overlap"


def test_a_request_that_is_wrong_for_all_gpus_is_refused_once() -> None:
    with pytest.raises(UserInputError, match=r"^model=nonsense: unknown model") as refusal:
        compare_hardware(read_request(["model=nonsense", "hardware=h100,b200", "gpus=8"]), ["h100", "b200"])
    assert str(refusal.value).count("unknown model") == 1


def test_a_rate_beyond_the_peak_of_all_gpus_is_refused_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeper.commands.plan.answer.find_layouts", None)
    words = ["model=llama3_405b", "hardware=h100", "train_tokens=15e12", "days=0.5"]
    with pytest.raises(
        UserInputError,
        match=r"^days=0.5 \(train_tokens=1.5e\+13\): takes 886,\d{3} GPUs at their peak, and at most 65,536 are",
    ):
        find_problem(read_request(words))


@pytest.mark.parametrize("words", [["tokens_per_day=1e9"], ["gpus=8", "out=plan.html"]])
def test_searches_of_many_numbers_of_gpus_show_their_progress_on_a_terminal(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sweeper.commands.plan.answer.SCALES", (4, 8))
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        assert COMMAND.run(["model=llama3_8b", "hardware=h100", "tp=1", "pp=1", "cp=1", *words]) == 0
        assert ("searching 8 x h100" in capsys.readouterr().err) == is_terminal


def test_a_rate_near_the_peak_is_reached_by_fewer_gpus_where_a_given_degree_excludes_the_most() -> None:
    words = ["model=llama3_8b", "hardware=h100", "dp_shard=96", "tp=1", "pp=1", "cp=1", "micro_batch=1"]
    assert find_problem(read_request([*words, "tokens_per_day=4e13"]))[0].cluster.gpus == 49_152
    with pytest.raises(UserInputError, match=r"takes 57,\d{3} GPUs at their peak, and at most 55,296 are planned"):
        find_problem(read_request(["model=llama3_8b", "hardware=gb200", "tokens_per_day=2.4e14"]))


def test_more_gpus_than_a_rate_tries_are_refused_by_their_key() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=100000", "tokens_per_day=1e9"]
    with pytest.raises(UserInputError, match=r"^gpus=100000: at most 65,536 with tokens_per_day="):
        find_problem(read_request(words))


def test_a_number_of_days_finds_the_number_of_gpus() -> None:
    words = ["model=llama3_8b", "hardware=h100", "tp=1", "pp=1", "cp=1", "micro_batch=1"]
    given = read_request([*words, "train_tokens=1e12", "gpus=16"])
    training = plan_training(given, search(build_problem(given), keep=1).best[0].estimate, BandEnds(0.1, 0.1))
    for lost_share, gpus in ((0.0, 16), (training.lost_share / 2, 24)):  # failures included
        days = 1.00001 * training.days * (1 - lost_share)
        found = find_problem(read_request([*words, "train_tokens=1e12", f"days={days}"]))[0]
        assert found.cluster.gpus == gpus
    priced = [*words, "train_tokens=1e12", "price_per_hour=2", "gpus=8"]
    with pytest.raises(
        UserInputError,
        match=r"max_cost=1000: train_tokens=1e\+12 on 8 GPUs cost [\d,]+ \([\d,]+ to [\d,]+\) at price_per_hour=2;",
    ):
        answer(read_request([*priced, "max_cost=1000"]))
    with pytest.raises(UserInputError, match="days=3: takes the place of tokens_per_day="):
        read_request([*words, "days=3", "tokens_per_day=1e9"])
    with pytest.raises(UserInputError, match=r"fits=true: needs gpus=; days=, tokens_per_day= and max_cost= search"):
        COMMAND.run([*words, "days=3", "fits=true"])
    hurried = answer(read_request([*words, "train_tokens=1e12", "days=0.5"]))
    assert hurried.problem.cluster.gpus > 512 and any("learns as well" in line for line in tail_lines(hurried))


FIXED = ["model=llama3_8b", "hardware=h100", "tp=1", "pp=1", "cp=1", "micro_batch=1", "price_per_hour=2"]


def plan_cost(*words: str) -> tuple[int, float, float]:
    """Return the number of GPUs, the cost and the days of a plan."""
    found = answer(read_request([*FIXED, *words]))
    return found.problem.cluster.gpus, found.training.cost or 0.0, found.training.days


def test_a_cost_finds_the_fastest_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    _, limit, _ = plan_cost("gpus=320")
    gpus, cost, days = plan_cost(f"max_cost={limit}")
    assert cost <= limit and 320 / 32 < gpus < 512
    _, higher, _ = plan_cost(f"gpus={gpus + gpus // 31 + 8}")  # the search ends within a node or 1/31
    assert higher > limit and days < plan_cost(f"gpus={gpus // 2}")[2]
    assert COMMAND.run([*FIXED, f"max_cost={limit}"]) == 0
    printed = capsys.readouterr().out
    assert f"reached   by {gpus:,} GPUs" in printed and "too few" not in printed


def test_the_cheapest_number_of_gpus_is_named_if_none_meets_the_cost() -> None:
    with pytest.raises(UserInputError) as refusal:
        answer(read_request([*FIXED, "max_cost=1000"]))
    found = r"^max_cost=1000: train_tokens=1e\+12 on ([\d,]+) GPUs, the cheapest number found, cost"
    named = re.search(found, str(refusal.value))
    assert named and "fewer GPUs" not in str(refusal.value)
    cheapest = plan_cost(f"gpus={named[1].replace(',', '')}")[1]
    assert all(cheapest <= plan_cost(f"gpus={gpus}")[1] for gpus in (8, 64, 512, 4096))


def test_a_cost_without_a_price_or_a_valid_number_of_gpus_is_refused() -> None:
    with pytest.raises(UserInputError, match="max_cost=9: needs price_per_hour=, mi355x has no known price"):
        find_problem(read_request(["model=llama3_8b", "hardware=mi355x", "max_cost=9"]))
    with pytest.raises(UserInputError, match=r"max_cost=9: no number of GPUs can be planned\. .*is not a multiple of"):
        find_problem(read_request([*FIXED, "dp_shard=7", "max_cost=9"]))


def test_days_take_more_gpus_than_the_fewest_if_they_need_fewer_gpu_hours() -> None:
    words = ["model=llama3_8b", "hardware=rtx4090", "price_per_hour=1"]
    few, more = (answer(read_request([*words, f"gpus={gpus}"])).training for gpus in (8, 16))
    assert 1.05 * more.gpu_hours < few.gpu_hours
    found = answer(read_request([*words, f"days={1.0001 * few.days}"]))
    assert found.problem.cluster.gpus == 16
    saved = f"8 GPUs are enough, but need {few.gpu_hours / more.gpu_hours - 1:.0%} more GPU-hours"
    assert saved in "\n".join(head_lines(found))


@pytest.mark.parametrize("tokens", [1.05e12, 1.5e12])
def test_a_cost_that_is_refused_is_shown_above_its_limit(tokens: float) -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=8", "tp=1", "pp=1", "cp=1", "micro_batch=1", "price_per_hour=2"]
    words.append(f"train_tokens={tokens:g}")
    limit = (answer(read_request(words)).training.cost or 0.0) - 1
    with pytest.raises(UserInputError) as refusal:
        answer(read_request([*words, f"max_cost={limit}"]))
    cost = re.search(r"GPUs cost ([\d,.]+) \(", str(refusal.value))
    assert cost and float(cost[1].replace(",", "")) > limit
    missed = "is met by the middle of the band, not by its slow end"
    for factor, is_missed in ((1.01, True), (3.0, False)):
        lines = tail_lines(answer(read_request([*words, f"max_cost={factor * limit}"])))
        assert any(line == f"max_cost  {factor * limit:g} {missed}" for line in lines) == is_missed
