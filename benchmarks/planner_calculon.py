"""Compare Calculon with this planner on the published runs that Calculon can express.

    git clone https://github.com/calculon-ai/calculon FOLDER
    python benchmarks/planner_calculon.py FOLDER

Calculon supports blocks with as many key-value heads as heads, with GELU and without an output layer. It models the
A100 of its validation (`systems/a100_80e.json`) with the row's network. The planner's estimates use efficiencies fitted
without the row's source; Calculon was developed with the rows of arXiv 2205.05198.
"""

import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner import RECENT_ROWS, ROWS, read_runs, score_left_out
from benchmarks.planner_rows import PublishedRun

RECOMPUTED = {"none": "none", "core_attention": "attn_only", "full": "full"}  # Calculon's names
NETWORKS = {"tensor_par_net": 0, "pipeline_par_net": 1, "data_par_net": 1}  # NVLink and the network
UNUSED = dict.fromkeys(("weight_offload", "activations_offload", "optimizer_offload", "data_par_overlap"), False)


def is_expressible(run: PublishedRun) -> bool:
    model, layout = run.job.model, run.job.layout
    is_gpt = model.activation == "gelu" and model.heads == model.kv_heads and not model.experts
    has_states = layout.sharding in ("none", "zero1") and layout.cp == 1
    is_a100 = run.cluster.device.name == "a100" and run.job.precision == "fp16_amp"
    return run.step_s is not None and is_gpt and has_states and is_a100 and layout.checkpointing in RECOMPUTED


def application(run: PublishedRun) -> dict[str, int]:
    model = run.job.model
    sizes = {"hidden": model.hidden_size, "feedforward": model.intermediate_size, "num_blocks": model.layers}
    return {**sizes, "seq_size": run.job.sequence_length, "attn_heads": model.heads, "attn_size": model.head_size}


def execution(run: PublishedRun) -> dict[str, Any]:
    layout = run.job.layout
    return {
        **NETWORKS,
        **UNUSED,
        "num_procs": run.cluster.gpus,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "batch_size": layout.global_batch,
        "microbatch_size": layout.micro_batch,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTED[layout.checkpointing],
        "pipeline_interleaving": layout.stages_per_rank,
        "optimizer_sharding": layout.sharding == "zero1" and layout.dp > 1,
        "tensor_par_comm_type": "rs_ag" if layout.sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": layout.sequence_parallel,
        "training": True,
    }


def estimate_all(folder: Path, runs: list[PublishedRun]) -> Iterator[float | str]:
    """Yield each run's step time in seconds, or the reason why Calculon cannot run it."""
    sys.path.insert(0, str(folder))
    sys.modules["psutil"] = ModuleType("psutil")  # only Calculon's search needs it, which does not run here
    llm, machine = import_module("calculon.llm").Llm, json.loads((folder / "systems/a100_80e.json").read_text())
    for run in runs:
        machine["networks"][1]["bandwidth"] = run.cluster.topology.network_gb_s
        system = import_module("calculon").System(machine)
        model = llm(llm.Application(application(run)), logging.getLogger("calculon"))
        try:
            model.compile(system, llm.Execution.from_json(execution(run)))
            model.run(system)
            yield float(model.get_total_time())
        except llm.Error as error:
            yield str(error)


def compare(planner: str, file: str, estimate: Callable[[Path, list[PublishedRun]], Iterator[float | str]]) -> None:
    """Print the errors of both planners; the command's argument is the folder of the other, which contains `file`."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / file).is_file():
        raise SystemExit(f"Usage: python {sys.argv[0]} FOLDER, a clone of {planner}'s repository")
    own_runs = read_runs(ROWS)[0]
    runs = [run for path in (ROWS, RECENT_ROWS) for run in read_runs(path)[0] if is_expressible(run)]
    scores = {id(each.run): each for each in score_left_out(runs, own_runs) if each.family == "dense"}
    print(f"source, run: measured s, this planner, {planner}")
    errors: dict[str, list[tuple[float, float]]] = {}
    for run, theirs in zip(runs, estimate(Path(sys.argv[1]), runs), strict=True):
        ours, measured = scores[id(run)].error_percent, run.step_s or 1.0
        name = f"{run.source}, {run.name} micro-batch {run.job.layout.micro_batch}: {measured:.2f}, {ours:+.1f}%"
        if isinstance(theirs, str):
            print(f"{name}, refused: {theirs}")
            continue
        error = 100 * (theirs / measured - 1)
        print(f"{name}, {error:+.1f}%")
        errors.setdefault(run.source, []).append((abs(ours), abs(error)))
    for source, pairs in errors.items():
        means = [statistics.fmean(values) for values in zip(*pairs, strict=True)]
        print(f"{source}: {len(pairs)} rows, MAPE {means[0]:.1f}% and {means[1]:.1f}%")


if __name__ == "__main__":
    compare("Calculon", "systems/a100_80e.json", estimate_all)
