"""The published table of estimated cells is what the planner says, and more memory is never slower in it."""

import json
from itertools import permutations

from benchmarks.offload_cells import RATES, estimate_cells, read_cells


def test_more_memory_is_never_slower_in_the_table() -> None:
    cells = read_cells()
    compared = 0
    for smaller, larger in permutations(cells, 2):
        if any(smaller[key] != larger[key] for key in ("model", "sequence_length")):
            continue
        if all(float(smaller[key]) <= float(larger[key]) for key in ("host_gib", "device_gib")):
            compared += 1
            rates = [float(cell["estimated_tokens_per_s"]) for cell in (smaller, larger)]
            assert rates[1] >= rates[0], (smaller, larger)
    assert compared > 1000


def test_a_cell_of_the_table_is_what_the_planner_says() -> None:
    cell = next(cell for cell in read_cells() if cell["model"] == "llama3_1b" and cell["sequence_length"] == "131072")
    columns = estimate_cells(json.loads(RATES.read_text()), False, [cell])[0]
    assert {key: cell[key] for key in columns} == columns
