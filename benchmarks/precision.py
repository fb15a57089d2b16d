"""The four tables of what fewer bits gain, on one GPU.

    python benchmarks/precision.py [--tables precision,precision_casts,precision_linear,precision_training] [--into DIR]

Each table is a sweep of `python -m sweeper workload=…` over every point of its space; here it is laid out so that
recipes stand beside each other, and a cell that cannot be says why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
from matmul import sweep  # type: ignore[import-not-found]

# What stands in the rows, in the columns and in the cells of each table.
LAYOUTS = {
    "precision": (["layer", "product"], "recipe", ["tflops", "speedup", "mfu", "sqnr_db"]),
    "precision_casts": (["format", "direction"], "implementation", ["gb_per_s", "bandwidth_utilization"]),
    "precision_linear": (
        ["part"],
        "recipe",
        ["tflops", "speedup", "predicted_speedup", "sqnr_db", "sqnr_input_gradient_db", "sqnr_weight_gradient_db"],
    ),
    "precision_training": (["scope"], "recipe", ["tokens_per_s", "step_time_ms", "loss", "peak_memory_gib"]),
}


def show(table: str, trials: pd.DataFrame) -> None:
    """The sweep's figures, one pivot each, and the reasons of the empty cells."""
    rows, columns, metrics = LAYOUTS[table]
    keys = [f"param.{name}" for name in rows]
    for name in (*keys, f"param.{columns}"):
        if name not in trials:  # the same for all
            trials[name] = ""
    print(f"\n## {table}\n")
    for figure in [name for name in metrics if name in trials and trials[name].notna().any()]:
        pivot = trials.pivot_table(index=keys, columns=f"param.{columns}", values=figure, sort=False)
        pivot.index.names, pivot.columns.name = rows, figure
        print(pivot.round(3 if figure != "tokens_per_s" else 0).sort_index().to_string(na_rep="-"), "\n")
    for reason, group in trials[trials.reason.notna()].groupby("reason"):
        where = sorted(
            {" ".join(str(line[key]) for key in (*keys, f"param.{columns}")) for _, line in group.iterrows()}
        )
        print(f"- {len(group)} without a speed ({', '.join(where[:4])}{', …' if len(where) > 4 else ''}): {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(LAYOUTS))
    parser.add_argument("--into", type=Path, default=Path("benchmark_precision"))
    parser.add_argument("words", nargs="*", help="more for the sweeps, such as space.tokens=4096")
    said = parser.parse_args()
    said.into.mkdir(parents=True, exist_ok=True)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"# Precision: {gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for table in said.tables.split(","):
        done = sweep(said.into, table, f"workload={table}", *said.words)
        show(table, done.trials)
        print(f"\n{done.wall_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
