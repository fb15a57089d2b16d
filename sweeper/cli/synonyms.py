"""Names that others give to the choices of our groups."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.api.errors import suggest

SYNONYMS = {
    "search": {
        "tpe": "bayes bayesian bayesian_optimization optuna hyperopt parzen smac default",
        "gp": "gaussian gaussian_process kriging botorch bo",
        "qmc": "sobol halton quasi_random quasirandom lhs latin_hypercube",
        "grid": "exhaustive brute_force bruteforce all full cartesian product",
        "cmaes": "cma cma-es cma_es evolution evolutionary",
        "random": "uniform rand monte_carlo",
    },
    "workload": {
        "matmul": "gemm mm matrix cublas flops",
        "matmul_layers": "gemms layers",
        "allreduce": "all_reduce all-reduce",
        "collectives": "nccl rccl nccl_tests nccl-tests all_gather reduce_scatter all_to_all sendrecv",
        "llama8b": "offload llama llama3 llama3_8b training train",
        "llama1b": "llama3_1b",
        "parallel": "fsdp fsdp2 ddp distributed pipeline layout llama3_70b llama70b",
        "megatron": "megatron_lm megatron-lm mcore",
        "precision": "fp8 torchao quantization",
        "command": "custom script shell",
    },
    "hardware": {
        "auto": "gpu cuda rocm nvidia amd any",
        "h100": "h100_sxm h100-sxm hopper",
        "mi300x": "mi300 mi300a",
    },
}


def suggest_choice(group: str, choice: str, allowed: Iterable[str]) -> str:
    """Return the sentences that follow an unknown choice: the available ones, and the one that it stands for."""
    names = list(allowed)
    targets = [name for name, others in SYNONYMS.get(group, {}).items() if choice.lower() in others.split()]
    if not targets or targets[0] not in names:
        return suggest(choice, names)
    return f"Available: {', '.join(sorted(names))}. Did you mean {targets[0]}?"
