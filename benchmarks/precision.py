"""Measure the speed and error of low-precision formats on one GPU, in three tables.

    python benchmarks/precision.py [--tables precision,precision_casts,precision_linear] [--into DIR]

Each table is a `python -m sweeper workload=…` sweep over every point of its space. The recipes are columns, and the
reasons for empty cells are listed below each table.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from matmul import run_sweep  # type: ignore[import-not-found]

# The parameters in the rows and in the columns of each table, and the metrics in its cells.
LAYOUTS = {
    "precision": (["layer", "product"], "recipe", ["tflops", "speedup", "mfu", "sqnr_db"]),
    "precision_casts": (["format", "direction"], "implementation", ["gb_per_s", "bandwidth_utilization"]),
    "precision_linear": (
        ["part"],
        "recipe",
        ["tflops", "speedup", "predicted_speedup", "sqnr_db", "sqnr_input_gradient_db", "sqnr_weight_gradient_db"],
    ),
}


def show(table: str, trials: pd.DataFrame) -> None:
    """Print a pivot table for each metric of the sweep, and the reasons for empty cells."""
    rows, columns, metrics = LAYOUTS[table]
    keys = [f"param.{name}" for name in rows]
    for name in (*keys, f"param.{columns}"):
        if name not in trials:  # trials.csv has no column for a parameter that all trials share
            trials[name] = ""
    print(f"\n## {table}\n")
    for metric in [name for name in metrics if name in trials and trials[name].notna().any()]:
        pivot = trials.pivot_table(index=keys, columns=f"param.{columns}", values=metric, sort=False)
        pivot.index.names, pivot.columns.name = rows, metric
        print(pivot.round(3).sort_index().to_string(na_rep="-"), "\n")
    for reason, group in trials[trials.reason.notna()].groupby("reason"):
        points = sorted(
            {" ".join(str(trial[key]) for key in (*keys, f"param.{columns}")) for _, trial in group.iterrows()}
        )
        print(f"- {len(group)} without a speed ({', '.join(points[:4])}{', …' if len(points) > 4 else ''}): {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(LAYOUTS))
    parser.add_argument("--into", type=Path, default=Path("benchmark_precision"))
    parser.add_argument("overrides", nargs="*", help="overrides for every sweep, such as space.tokens=4096")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"# Precision: {gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for table in args.tables.split(","):
        done = run_sweep(args.into, table, f"workload={table}", *args.overrides)
        show(table, done.trials)
        print(f"\n{done.wall_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
