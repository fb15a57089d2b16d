"""Each published claim has a card, and a card says what it takes to measure the claim again."""

import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import verify
from tests.conftest import REPOSITORY

CARDS = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "benchmarks/cards").glob("*.yaml"))
}
GPU_PAGES = sorted(path.name for path in (REPOSITORY / "benchmarks/results").glob("*_h100.md"))
PUBLISHED = ["README.md", *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))]


def text_of(path: str) -> str:
    """Return a page's text with its line breaks as single spaces."""
    return " ".join((REPOSITORY / path).read_text().split())


@pytest.mark.parametrize("name", CARDS)
def test_a_card_names_a_command_a_page_and_what_it_claims(name: str) -> None:
    card = verify.read_card(REPOSITORY / f"benchmarks/cards/{name}.yaml")
    program = shlex.split(card["command"])[1:3]
    module = (REPOSITORY / program[1].replace(".", "/")) if program[0] == "-m" else REPOSITORY / program[0]
    exists = module.exists() or module.with_suffix(".py").exists() or program == ["-m", "pytest"]
    assert exists, card["command"]
    assert (REPOSITORY / card["page"]).is_file() and card["gates"] and card["claims"]
    assert all(
        card[key] not in (None, "") for key in ("commit", "date", "versions", "clocks", "samples", "interval", "missed")
    )
    for path, claim in card["claims"].items():
        assert claim in text_of(path), f"{path} no longer says: {claim}"
    for gate in card["gates"]:
        assert "pattern" not in gate or re.compile(gate["pattern"]).groups == 1
        assert "column" not in gate or "dir={scratch}" in card["command"]


@pytest.mark.parametrize("path", PUBLISHED)
def test_a_result_that_a_page_refers_to_has_a_card_with_what_that_page_claims(path: str) -> None:
    pages = set(re.findall(r"benchmarks/results/\w+\.md", text_of(path)))
    claimed = {card["page"] for card in CARDS.values() if path in card["claims"]}
    assert pages <= claimed


def test_every_figure_that_the_readme_measured_is_in_a_claim_of_a_card_it_links() -> None:
    section = re.search(r"## Measured(.+?)## Documentation", text_of("README.md"))
    assert section
    bullets = section[1].split(" - **")[1:]
    assert len(bullets) >= 4
    for bullet in bullets:
        linked = [CARDS[name] for name in re.findall(r"benchmarks/cards/(\w+)\.yaml", bullet)]
        assert linked, bullet
        for card in linked:
            bullet = bullet.replace(card["claims"]["README.md"], "")
        rest = re.sub(r"\[[^]]*\]\([^)]*\)", "", bullet)
        assert not re.search(r"\d", rest), f"not in a card: {rest}"


@pytest.mark.parametrize("page", GPU_PAGES)
def test_every_result_on_h100s_has_a_card(page: str) -> None:
    assert any(card["page"].endswith(page) and "H100" in card["machine"].get("gpu", "") for card in CARDS.values())


def run_verify(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks/verify.py"), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_planners_card_holds_when_it_is_measured_again() -> None:
    ran = run_verify("planner")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("holds: ") == len(CARDS["planner"]["gates"]) + 1 and "fails" not in ran.stdout


def test_a_card_is_not_verified_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"machine": {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 2}, "command": "false", "gates": []}
    monkeypatch.setattr(verify, "list_gpus", lambda: ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
    assert verify.verify(card) == 4
    assert (
        "measured on 2 x NVIDIA H100 80GB HBM3; here are NVIDIA H100 80GB HBM3, NVIDIA H200" in capsys.readouterr().out
    )


def test_a_name_without_a_card_is_refused_with_the_names_of_all() -> None:
    ran = run_verify("plannr")
    assert ran.returncode == 2 and "planner" in ran.stderr and "plannr" in ran.stderr


def card_of(printed: str, **gate: Any) -> dict[str, Any]:
    command = f"python -c {shlex.quote(f'print({printed!r})')}"
    return {"machine": {"gpus": 0}, "command": command, "gates": [gate], "date": "2026-01-01", "commit": "abc"}


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ({"pattern": r"rate (\d+)", "comparison": "at least", "value": 200}, 0),  # the median of 100, 200 and 900
        ({"pattern": r"rate (\d+)", "comparison": "at least", "value": 201}, 1),
        ({"pattern": r"rate (\d+)", "comparison": "at least", "value": 210, "tolerance": 0.05}, 0),
        ({"pattern": r"rate (\d+)", "comparison": "at most", "value": 199}, 1),
        ({"pattern": r"rate (\d+)", "comparison": "at most", "value": 190, "tolerance": 0.06}, 0),
        ({"pattern": r"rate (\d+)", "comparison": "within", "value": 210, "tolerance": 0.05}, 0),
        ({"pattern": r"rate (\d+)", "comparison": "within", "value": 190, "tolerance": 0.05}, 1),
        ({"pattern": r"speed (\d+)", "comparison": "at least", "value": 0}, 1),  # nothing measured is not a pass
    ],
)
def test_a_gate_compares_the_median_of_what_was_printed(gate: dict[str, Any], code: int) -> None:
    assert statistics.median([100, 900, 200]) == 200
    assert verify.verify(card_of("rate 100, rate 900, rate 200", **gate)) == code


SWEEP = (
    "import pathlib; path = pathlib.Path('{scratch}/sweeps/name/trials.csv'); path.parent.mkdir(parents=True); "
    "path.write_text('outcome,param.x,rate\\ncomplete,1.0,10\\nfailed,1.0,99\\ncomplete,1.0,12\\ncomplete,2.0,30\\n')"
)


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ({"column": "rate", "where": {"param.x": 1.0}, "value": 11}, 0),  # the median of 10 and 12
        ({"column": "rate", "where": {"param.x": 2.0}, "value": 30}, 0),
        ({"column": "rate", "value": 12}, 0),
        ({"column": "rate", "value": 11}, 1),
        ({"column": "rate", "where": {"param.x": 3.0}, "value": 0}, 1),
        ({"column": "speed", "value": 0}, 1),
    ],
)
def test_a_gate_compares_the_median_of_the_complete_trials_that_it_selects(gate: dict[str, Any], code: int) -> None:
    card = card_of("", comparison="within", tolerance=0.0, **gate) | {"command": f"python -c {shlex.quote(SWEEP)}"}
    assert verify.verify(card) == code


@pytest.mark.parametrize("printed", ["", "rate 100", "[]", "3", '{"a": {"b": []}}', '{"a": {"c": 1}}', '{"a": 1}'])
def test_output_without_the_gates_number_does_not_hold(printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    gate = {"key": "a.b.0", "comparison": "at least", "value": 0}
    assert verify.verify(card_of(printed, **gate)) == 1
    assert "fails: a.b.0: nothing" in capsys.readouterr().out
    assert verify.verify(card_of('{"a": {"b": [1]}}', **gate)) == 0


def test_a_command_that_fails_does_not_hold() -> None:
    card = card_of("", pattern="(.)", comparison="at least", value=0) | {"command": "python -c 'raise SystemExit(3)'"}
    assert verify.verify(card) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"command": None},
        {"speed": 1},
        {"gates": [{"key": "a"}]},
        {"gates": [{"key": "a", "comparison": "is", "value": 1}]},
    ],
)
def test_a_card_with_a_missing_key_or_an_unknown_gate_is_invalid(change: dict[str, Any], tmp_path: Path) -> None:
    card = {key: value for key, value in (CARDS["planner"] | change).items() if value is not None}
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(card))
    with pytest.raises(verify.InvalidCard):
        verify.read_card(tmp_path / "card.yaml")


PRINTED = (
    *("acceptance", "coverage", "diagnose", "head_memory", "matmul_h200", "node_faults", "overhead", "scale", "store"),
    *("track", "warm_start"),
)


@pytest.mark.parametrize("name", PRINTED)
def test_the_gates_find_their_metrics_in_what_the_command_printed_for_the_page(name: str) -> None:
    printed = (REPOSITORY / CARDS[name]["page"]).read_text()
    for gate in CARDS[name]["gates"]:
        metric = verify.read_metric(gate, printed, "")
        assert metric is not None and verify.passes(gate, metric), gate
