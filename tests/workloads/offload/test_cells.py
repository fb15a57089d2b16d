"""The published table of estimated cells is what the planner says, and more memory is never slower in it."""

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offload_cells import (
    CELLS,
    RESULTS,
    catalogue_rates,
    estimate_cells,
    interpolate_rates,
    read_cells,
    read_rates,
)

OF_H100 = RESULTS / "offload_h100_cells.csv"


@pytest.mark.parametrize("table", [CELLS, OF_H100], ids=["h200", "h100"])
def test_more_memory_is_never_slower_in_the_table(table: Path) -> None:
    cells = read_cells(table)
    compared = 0
    for smaller, larger in permutations(cells, 2):
        if any(smaller[key] != larger[key] for key in ("model", "sequence_length")):
            continue
        if all(float(smaller[key]) <= float(larger[key]) for key in ("host_gib", "device_gib")):
            compared += 1
            rates = [float(cell["estimated_tokens_per_s"]) for cell in (smaller, larger)]
            assert rates[1] >= rates[0], (smaller, larger)
    assert compared > 1000


@pytest.mark.parametrize(
    ("table", "model", "find_rates"),
    [
        (CELLS, "llama3_1b", partial(interpolate_rates, read_rates())),
        (OF_H100, "qwen2_5_32b", partial(catalogue_rates, "h100")),
    ],
    ids=["h200", "h100"],
)
def test_a_cell_of_the_table_is_what_the_planner_says(table: Path, model: str, find_rates: Any) -> None:
    cell = next(cell for cell in read_cells(table) if (cell["model"], cell["sequence_length"]) == (model, "131072"))
    columns = estimate_cells(find_rates, False, [cell])[0]
    assert columns and {key: cell[key] for key in columns} == columns
