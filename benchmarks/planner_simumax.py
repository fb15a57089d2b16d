"""Compare SimuMax with this planner on the published runs on A100s that Calculon can express.

    git clone https://github.com/MooreThreads/SimuMax FOLDER
    pip install tabulate pandas sympy graphviz tqdm
    python benchmarks/planner_simumax.py FOLDER

SimuMax publishes measured rates for the A100 over PCIe and for the B200. The comparison uses those of the A100
(`configs/system/a100_pcie.json`), and replaces its networks with NVLink, with the efficiencies of the B200's file, at
the bandwidths of the row's topology.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner_calculon import compare
from benchmarks.planner_rows import PublishedRun

RECOMPUTED = {"none": None, "core_attention": "sdp_only", "full": "full_block"}  # SimuMax's names
SYSTEMS = "configs/system/a100_pcie.json", "configs/system/b200_bf16_ceperm.json"  # rates, efficiencies of NVLink


def model_config(run: PublishedRun) -> dict[str, Any]:
    model = run.job.model
    heads = {"head_num": model.heads, "kv_head_num": model.kv_heads, "head_size": model.head_size}
    sizes = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    return {**heads, **sizes, "layer_num": model.layers, "vocab_size": model.vocabulary, "use_swiglu": False}


def strategy(run: PublishedRun) -> dict[str, Any]:
    layout = run.job.layout
    recomputed = RECOMPUTED[layout.checkpointing]
    return {
        "seq_len": run.job.sequence_length,
        "micro_batch_size": layout.micro_batch,
        "micro_batch_num": layout.global_batch // layout.dp // layout.micro_batch,
        "world_size": run.cluster.gpus,
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "pp_comm_async": layout.stages_per_rank == 1,  # SimuMax does not time interleaved stages with it
        "interleaving_size": layout.stages_per_rank,
        "zero_state": int(layout.sharding == "zero1"),
        "enable_sequence_parallel": layout.sequence_parallel,
        "enable_recompute": recomputed is not None,
        "recompute_granularity": recomputed,
        "recompute_layer_num": run.job.model.layers // layout.pp if recomputed else 0,
        "use_flash_sdp": False,
        "use_math_sdp": True,
    }


def system(run: PublishedRun, machine: dict[str, Any], nvlink: dict[str, Any]) -> dict[str, Any]:
    topology = run.cluster.topology
    networks = deepcopy(nvlink)
    for name in ("low_intra_node", "high_intra_node"):
        networks[name]["bandwidth"]["gbps"] = topology.link_gb_s
    networks["inter_node"]["bandwidth"]["gbps"] = topology.network_gb_s * machine["num_per_node"]
    return {**machine, "networks": networks}


def estimate_all(folder: Path, runs: list[PublishedRun]) -> Iterator[float | str]:
    """Yield each run's step time in seconds, or the reason why SimuMax cannot run it."""
    sys.path.insert(0, str(folder))
    config, planner = import_module("simumax.core.config"), import_module("simumax.core.perf_llm").PerfLLM
    machine, other = (json.loads((folder / name).read_text()) for name in SYSTEMS)
    for run in runs:
        one = planner()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                one.configure(
                    strategy_config=config.StrategyConfig.init_from_dict(strategy(run)),
                    model_config=config.ModelConfig.init_from_dict(model_config(run)),
                    system_config=config.SystemConfig.init_from_dict(system(run, machine, other["networks"])),
                )
                one.run_estimate()
                cost = one.analysis_cost().data
            tokens = run.job.layout.global_batch * run.job.sequence_length
            yield tokens / run.cluster.gpus / float(cost["throughput_per_accelerator"])
        except (AssertionError, RuntimeError) as error:
            yield str(error)


if __name__ == "__main__":
    compare("SimuMax", SYSTEMS[0], estimate_all)
