"""Compare the distributions of offloaded training over the GPUs of a host, without a GPU.

    python benchmarks/offload_distributions.py [--sequences 64] [--host-gib 128]

Prints tokens/s for each GPU under the fastest plan of each distribution (`workloads.offload.plan`), with the
catalogue's rates, in bf16 with int8 moments and sequences of 8192 tokens. Each GPU adds `--host-gib` of host memory and
a link to the host, and uses 95% of its own memory.
"""

import argparse
from dataclasses import replace

from sweeper.preflight.clusters import build_cluster
from workloads.models.model import MODELS
from workloads.offload import OffloadParameters
from workloads.offload.catalogue_rates import estimate_rates, model_sizes
from workloads.offload.cost_model import MemoryBudget
from workloads.offload.plan import Distribution
from workloads.offload.plan_search import find_fastest_plans

LENGTH = 8192
MACHINES = {"H200, NVLink": ("h200", "h200_400g"), "H100, PCIe 5 alone": ("h100_pcie", "pcie5_8")}
NAMES = {"llama3_8b": "8B", "qwen2_5_32b": "32B", "llama3_70b": "70B"}
DISTRIBUTIONS: tuple[Distribution, ...] = ("replicas", "sharded", "ring")


def estimate_row(model: str, machine: tuple[str, str], gpus: int, sequences: int, host_gib: float) -> list[float]:
    """Return the tokens/s per GPU for each distribution; 0 where no plan fits."""
    cluster = build_cluster(*machine, gpus)
    cluster = replace(cluster, topology=replace(cluster.topology, gpus_per_domain=max(8, gpus)))
    rates = estimate_rates(MODELS[model], LENGTH, "bf16", cluster)
    budget = MemoryBudget(0.95 * cluster.device.memory_gib, host_gib * gpus)
    sizes = model_sizes(OffloadParameters(0, 0, optimizer_states="int8"))
    sizes = replace(sizes, shape=MODELS[model])
    found = [
        find_fastest_plans(sizes.distribute(distribution, gpus), LENGTH, sequences, [budget], rates)[0]
        for distribution in DISTRIBUTIONS
    ]
    return [sequences * LENGTH / plan.times.step_s / gpus if plan else 0.0 for plan in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--host-gib", type=float, default=128)
    args = parser.parse_args()
    print(f"| machine | model | GPUs | {' | '.join(DISTRIBUTIONS)} | fastest |\n|---|---|---:|---:|---:|---:|---|")
    for machine, names in MACHINES.items():
        for model, name in NAMES.items():
            for gpus in (2, 4, 8, 16, 32, 64):
                rates = estimate_row(model, names, gpus, args.sequences, args.host_gib)
                best = max(zip(rates, DISTRIBUTIONS, strict=True))
                columns = " | ".join(f"{rate:,.0f}" if rate else "does not fit" for rate in rates)
                print(f"| {machine} | {name} | {gpus} | {columns} | {best[1] if best[0] else 'none'} |", flush=True)


if __name__ == "__main__":
    main()
