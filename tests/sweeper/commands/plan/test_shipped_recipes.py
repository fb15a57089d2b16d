"""The verdicts of `fits=true` on recipes that other projects ship, and their table in the guide."""

from benchmarks.planner_shipped import END, GUIDE, START, judge_all, read_rows, tables

ROWS = read_rows()


def test_the_verdicts_on_shipped_recipes_hold() -> None:
    found = judge_all(ROWS)
    differing = [
        (row["path"], row["variant"], verdict)
        for row, verdict in zip(ROWS, found, strict=True)
        if (row["verdict"], row["gib"]) != verdict
    ]
    assert not differing, "python benchmarks/planner_shipped.py --write"


def test_the_guide_has_the_table_of_shipped_recipes() -> None:
    assert GUIDE.read_text().partition(START)[2].partition(END)[0] == tables(ROWS) + "\n"


def test_layouts_with_a_known_outcome_are_judged_by_it() -> None:
    """All that ran out of memory are rejected, and all that ran fit, except one whose moments are in bf16."""
    known = [row for row in ROWS if row["ran"] in ("yes", "no")]
    assert sum(row["ran"] == "no" for row in known) >= 9 and sum(row["ran"] == "yes" for row in known) >= 10
    wrong = [row["path"] for row in known if (row["verdict"] == "fits") != (row["ran"] == "yes")]
    assert wrong == ["examples/megatron/configs/MI355X/qwen3_235B_A22B-BF16-pretrain.yaml"]
