"""Compare offloaded training with every published cell of ml_dataflow: all estimated without a GPU, some measured.

    python benchmarks/offload_cells.py rates llama3_8b:8192 …           # on a GPU: measure and store the device's rates
    python benchmarks/offload_cells.py measure llama3_8b:8192:70:40 …   # on a GPU: train within host and device GiB
    python benchmarks/offload_cells.py estimate [--processes 2] [--replay 20]
    python benchmarks/offload_cells.py estimate --replay 0 --hardware h100
    python benchmarks/offload_cells.py measure ml_dataflow_15b:8192:128:24 … --hardware h100 --steps 1
    python benchmarks/offload_cells.py draw

The cells are in `results/offload_h200_cells.csv`: Llama 3 8B and 1B, 512 to 262,144 tokens, all budgets up to 112 GiB
of host memory that ml_dataflow (C and CUDA) publishes for an H100, with its steps and rates. `estimate` plans each
cell's step with the rates in `results/offload_h200_rates.json`, interpolated in the sequence length, and replays the
plans of the cells with the lowest ratios. `measure` trains one warm-up step and three timed steps of about `--tokens`
tokens. With `--hardware h100`, the cells are those in `results/offload_h100_cells.csv`, which also has 15B and 32B with
128 GiB of host memory or more, planned with the catalogue's rates.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from sweeper.preflight.clusters import build_cluster
from tests.support import replay
from workloads.models.model import MODELS
from workloads.offload.catalogue_rates import estimate_rates
from workloads.offload.cost_model import DeviceRates, MemoryBudget, ModelSizes
from workloads.offload.plan import GIB
from workloads.offload.plan_search import Prediction, find_fastest_plans

RESULTS = Path(__file__).parent / "results"
CELLS, RATES, PICTURE = (RESULTS / f"offload_h200_{name}" for name in ("cells.csv", "rates.json", "cells.svg"))
REFERENCE = ("model", "sequence_length", "sequences_per_step", "host_gib", "device_gib", "reference_tokens_per_s")
FORESEEN = (
    "estimated_tokens_per_s",
    "estimated_ratio",
    "replayed_tokens_per_s",
    "plan_host_gib",
    "plan_device_gib",
    "link_share",
    "recompute_share",
    "copy_wait_share",
)
MEASURED = (
    "measured_tokens_per_s",
    "measured_ratio",
    "measured_sequences_per_step",
    "predicted_tokens_per_s",
    "measured_copy_wait_share",
    "measured_steps_s",
)
Cell = dict[str, str]


def read_cells(path: Path = CELLS) -> list[Cell]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_cells(cells: list[Cell], path: Path = CELLS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*REFERENCE, *FORESEEN, *MEASURED), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def name_cell(cell: Cell) -> str:
    return ":".join(cell[key] for key in ("model", "sequence_length", "host_gib", "device_gib"))


# ── rates ──


def read_rates() -> list[dict[str, Any]]:
    return list(json.loads(RATES.read_text())) if RATES.exists() else []


def interpolate_rates(stored: list[dict[str, Any]], model: str, sequence_length: int) -> DeviceRates:
    """Return a model's rates at a sequence length, linearly interpolated between the nearest two measured lengths.

    Attention time per token is linear in the length; everything else is independent of it. Outside the measured
    lengths, the nearest two are extrapolated. The time per additional segment comes from the longer length, since
    shorter sequences may not have been divided.
    """
    points = sorted((row for row in stored if row["model"] == model), key=lambda row: row["sequence_length"])
    points = [row | {"rates": asdict(DeviceRates(**row["rates"]))} for row in points]
    upper = next(
        (n for n, point in enumerate(points) if n and point["sequence_length"] >= sequence_length), len(points) - 1
    )
    low, high = points[upper - 1], points[upper]
    share = (sequence_length - low["sequence_length"]) / (high["sequence_length"] - low["sequence_length"])

    def mix(a: Any, b: Any) -> Any:
        return {key: mix(a[key], b[key]) for key in a} if isinstance(a, dict) else a + share * (b - a)

    mixed = mix(low["rates"], high["rates"])
    # A workspace is measured at the last segment, so it steps up with the length and is not extrapolated.
    mixed["workspace_bytes_per_token"] = max(row["rates"]["workspace_bytes_per_token"] for row in (low, high))
    exact = ("split_forward_s_per_token", "split_backward_s_per_token", "min_chunk_tokens")
    return DeviceRates(**mixed | {name: high["rates"][name] for name in exact})


def store_rates(model: str, length: int) -> None:
    """Store this GPU's rates under the GPU's name; a process measures them once."""
    import torch

    from workloads.instruments.process_setup import keep_compiled_kernels
    from workloads.offload.device_rates import measure_device_rates, select_attention_kernel
    from workloads.offload.optimizer import Precision

    keep_compiled_kernels()
    started, device, precision = time.perf_counter(), torch.device("cuda", 0), Precision()
    rates = asdict(measure_device_rates(model, length, device, precision))
    kernel = select_attention_kernel(MODELS[model], length, device, precision.dtype).name
    stored = [row for row in read_rates() if (row["model"], row["sequence_length"]) != (model, length)]
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "attention": kernel}
    stored.append({"model": model, "sequence_length": length, **machine, "rates": rates})
    RATES.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"rates of {model}:{length}: {time.perf_counter() - started:.0f} s, {kernel}", flush=True)


# ── estimated ──


def catalogue_rates(hardware: str, model: str, sequence_length: int) -> DeviceRates:
    return estimate_rates(MODELS[model], sequence_length, "bf16", build_cluster(hardware, None, 1))


def estimate_cells(find_rates: Callable[[str, int], DeviceRates], replays: bool, cells: list[Cell]) -> list[Cell]:
    """Return the columns of cells with the same model, length and step: the rates of plans or replays.

    `find_rates` returns the rates of a model at a sequence length. A cell that does not fit has no columns.
    """
    first, describe = cells[0], _replay if replays else _describe
    length, sequences = int(first["sequence_length"]), int(first["sequences_per_step"])
    rates = find_rates(first["model"], length)
    model = ModelSizes(MODELS[first["model"]], element_bytes=2, state_bytes_per_parameter=4)
    budgets = [MemoryBudget(float(cell["device_gib"]), float(cell["host_gib"])) for cell in cells]
    predictions = find_fastest_plans(model, length, sequences, budgets, rates)
    return [
        describe(prediction, cell, rates) if prediction else {}
        for prediction, cell in zip(predictions, cells, strict=True)
    ]


def _describe(prediction: Prediction, cell: Cell, rates: DeviceRates) -> Cell:
    plan, times = prediction.plan, prediction.times
    tokens_per_s = plan.tokens_per_step / times.step_s
    recompute_s = statistics.fmean(rates.recompute_s_per_token[saved] for saved, _ in plan.list_activations())
    return {
        "estimated_tokens_per_s": f"{tokens_per_s:.0f}",
        "estimated_ratio": f"{tokens_per_s / float(cell['reference_tokens_per_s']):.3f}",
        "plan_host_gib": f"{prediction.host_bytes / GIB:.1f}",
        "plan_device_gib": f"{prediction.device_bytes / GIB:.1f}",
        "link_share": f"{times.copied_bytes / 2 * rates.h2d_s_per_byte / times.step_s:.2f}",
        "recompute_share": f"{recompute_s * plan.tokens_per_step * len(plan.layers) / times.step_s:.3f}",
        "copy_wait_share": f"{times.copy_wait_s / times.step_s:.3f}",
    }


def _replay(prediction: Prediction, cell: Cell, rates: DeviceRates) -> Cell:
    """Return the rate of the second of two simulated steps."""
    with pytest.MonkeyPatch.context() as patch:
        one_s, two_s = (
            replay.simulate_steps_s(MODELS[cell["model"]], prediction.plan, rates, patch, steps) for steps in (1, 2)
        )
    return {"replayed_tokens_per_s": f"{prediction.plan.tokens_per_step / (two_s - one_s):.0f}"}


def estimate(processes: int, replayed: int, hardware: str | None) -> None:
    """Fill in the estimated columns of all cells, and the replayed columns of the cells with the lowest ratios."""
    path = RESULTS / f"offload_{hardware}_cells.csv" if hardware else CELLS
    cells = read_cells(path)
    find_rates = partial(catalogue_rates, hardware) if hardware else partial(interpolate_rates, read_rates())
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell["model"], cell["sequence_length"], cell["sequences_per_step"]].append(cell)
    with ProcessPoolExecutor(processes) as pool:
        for group, rows in zip(
            groups.values(), pool.map(partial(estimate_cells, find_rates, False), groups.values()), strict=True
        ):
            for cell, columns in zip(group, rows, strict=True):
                cell |= dict.fromkeys(FORESEEN, "") | columns
            write_cells(cells, path)
        fitting = [cell for cell in cells if cell["estimated_ratio"]]
        worst = sorted(fitting, key=lambda cell: float(cell["estimated_ratio"]))[:replayed]
        for cell, rows in zip(
            worst, pool.map(partial(estimate_cells, find_rates, True), [[cell] for cell in worst]), strict=True
        ):
            cell |= rows[0]
            write_cells(cells, path)
    for model in dict.fromkeys(cell["model"] for cell in cells):
        ratios = sorted(float(cell["estimated_ratio"]) for cell in fitting if cell["model"] == model)
        counts = f"{len(ratios)} of {sum(cell['model'] == model for cell in cells)} cells fit"
        below = sum(ratio < 1 for ratio in ratios)
        print(f"{model}: {counts}, {below} below 1, lowest {ratios[0]}, median {statistics.median(ratios)}")
    for cell in worst:
        print(name_cell(cell), *(f"{key} {cell[key]}" for key in FORESEEN), sep=", ")


# ── measured ──


def measure(names: list[str], tokens: int, steps: int, hardware: str | None) -> None:
    """Train within the budgets of the named cells, and fill in their measured columns.

    With `hardware`, the cells are those of its own table, with one warm-up round.
    """
    from workloads.api.contract import Infeasible, Rank
    from workloads.api.trial import run_trial

    path = RESULTS / f"offload_{hardware}_cells.csv" if hardware else CELLS
    cells = {name_cell(cell): cell for cell in read_cells(path)}
    for name in names:
        cell, started = cells[name], time.perf_counter()
        length = int(cell["sequence_length"])
        parameters = {
            "model": cell["model"],
            "sequence_length": length,
            "sequences_per_step": max(1, tokens // length),
            "warmup_rounds": 1 if hardware else None,
            "host_gib": float(cell["host_gib"]),
            "device_gib": float(cell["device_gib"]),
            "steps": steps,
        }
        try:
            measurement = run_trial("offload", parameters, Rank(device="cuda"))
        except Infeasible as error:  # also raised when memory runs out
            print(f"{name}: {error}", flush=True)
            continue
        step_s, metrics = statistics.median(measurement.step_times_s), measurement.metrics
        tokens_per_s = measurement.tokens_per_step / step_s
        cell |= {
            "measured_tokens_per_s": f"{tokens_per_s:.0f}",
            "measured_ratio": f"{tokens_per_s / float(cell['reference_tokens_per_s']):.3f}",
            "measured_sequences_per_step": str(parameters["sequences_per_step"]),
            "predicted_tokens_per_s": f"{metrics['predicted_tokens_per_s']:.0f}",
            "measured_copy_wait_share": f"{metrics['copy_wait_share']:.3f}",
            "measured_steps_s": " ".join(f"{seconds:.3f}" for seconds in measurement.step_times_s),
        }
        write_cells(list(cells.values()), path)
        more = {key: f"{metrics[key]:.1f}" for key in ("sm_clock_mhz", "startup_s", "peak_device_gib", "peak_host_gib")}
        print(
            name,
            *(f"{key} {cell[key]}" for key in MEASURED),
            *(f"{key} {value}" for key, value in more.items()),
            measurement.machine_info["attention"],
            f"start: {measurement.machine_info['startup']}",
            f"{time.perf_counter() - started:.0f} s in all",
            sep=", ",
            flush=True,
        )
        if not hardware:
            store_rates(cell["model"], length)


# ── the picture ──


def draw() -> None:
    """Draw the estimated ratio of every cell. Measured cells are framed and show the measured ratio."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    cells = read_cells()
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 13), layout="constrained")
    for axes, model in zip(panels, ("llama3_8b", "llama3_1b"), strict=True):
        of_model = [cell for cell in cells if cell["model"] == model]
        lengths = sorted({int(cell["sequence_length"]) for cell in of_model})
        budgets = sorted({(float(cell["host_gib"]), float(cell["device_gib"])) for cell in of_model})
        for cell in of_model:
            x = lengths.index(int(cell["sequence_length"]))
            y = budgets.index((float(cell["host_gib"]), float(cell["device_gib"])))
            measured = cell["measured_ratio"]
            ratio = float(measured or cell["estimated_ratio"])
            color = pyplot.get_cmap("RdYlGn")(min(1.0, max(0.0, (ratio - 0.85) / 0.3)))
            edge = {"edgecolor": "black", "linewidth": 2, "zorder": 2} if measured else {"edgecolor": "white"}
            axes.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, **edge))
            axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=7, zorder=3)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(budgets)), [f"{host:g}/{device:g}" for host, device in budgets], fontsize=7)
        axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(-0.5, len(budgets) - 0.5))
        axes.set(title=model, xlabel="tokens of a sequence", ylabel="host/device GiB")
    figure.suptitle("Tokens/s on one H200 over those that ml_dataflow publishes for one H100; framed: measured")
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "measure", "estimate", "draw"])
    parser.add_argument("names", nargs="*", help="model:sequence_length[:host_gib:device_gib]")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, default=20)
    parser.add_argument("--hardware", help="the cells of its own table, estimated by the catalogue's rates of it")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_intermixed_args()
    if args.what == "rates":
        for model, length in (name.split(":")[:2] for name in args.names):
            store_rates(model, int(length))
    elif args.what == "measure":
        measure(args.names, args.tokens, args.steps, args.hardware)
    elif args.what == "estimate":
        estimate(args.processes, args.replay, args.hardware)
    else:
        draw()


if __name__ == "__main__":
    main()
