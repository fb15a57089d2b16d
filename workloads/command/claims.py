"""What a program claims of its speed, held against the same steps by this project's definitions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from workloads.command.work import DeclaredWork
from workloads.formats.logs import Step
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS

CLAIM_TOLERANCE = 0.05
# Printed rates: the work that they count, and whether they are of one GPU.
CLAIMS = {
    "tokens_per_s": ("tokens", False),
    "tokens_per_s_per_gpu": ("tokens", True),
    "tflops": ("flops", False),
    "tflops_per_gpu": ("flops", True),
}
UNITS = {"tokens": "tokens/s", "flops": "TFLOP/s"}
ROUNDING = {"tokens": 0.5, "flops": 0.05}  # half of the last digit that Megatron-LM prints
# The operations that programs count, by `LogReader.kind`. Megatron-LM counted the whole attention matrix until 2025 and
# now its causal half; torchtitan counts the whole one. Other programs may also count six for each parameter.
CONVENTIONS = {"torchtitan": ("full attention",)} | dict.fromkeys(
    ("Megatron-LM", "Megatron-Bridge", "Primus", "NeMo"), ("causal attention", "full attention")
)
ALL_CONVENTIONS = ("causal attention", "full attention", "6 per parameter")


def find_contradictions(
    steps: Sequence[Step], work: DeclaredWork, tokens: int, length: int, gpus: int, program: str
) -> list[str]:
    """Return a phrase for each claim that the steps contradict.

    The median of a claim is compared with the median of the rates of the steps that print it. It is contradicted where
    it is off by more than `CLAIM_TOLERANCE` and lies outside of the 10th to 90th percentile of these rates. TFLOP/s are
    compared by each convention that the program may follow, and need a model.

    Args:
        steps: the measured steps.
        tokens: of a step.
        length: tokens of a sequence.
        program: as in `LogReader.kind`.
    """
    per_step = {"tokens": {"": float(tokens)} if tokens else {}, "flops": {}}
    if tokens and work.model:
        flops = flops_per_token(work.model, length)
        names = CONVENTIONS.get(program, ALL_CONVENTIONS)
        per_step["flops"] = {name: flops[name] * tokens / 1e12 for name in names}
    phrases = []
    for name, (kind, is_per_gpu) in CLAIMS.items():
        pairs = [
            (step.metrics[name], step.metrics["step_time_s"])
            for step in steps
            if name in step.metrics and step.metrics.get("step_time_s", 0.0) > 0
        ]
        shares = {convention: amount / (gpus if is_per_gpu else 1) for convention, amount in per_step[kind].items()}
        unit = UNITS[kind] + (" a GPU" if is_per_gpu and gpus > 1 else "")
        if pairs and shares and (phrase := _describe_contradiction(pairs, shares, unit, ROUNDING[kind])):
            phrases.append(phrase)
    return phrases


def flops_per_token(model: str, length: int) -> Mapping[str, float]:
    """Return the operations that training counts per token, by convention."""
    shape = MODELS[model]
    causal = model_flops_per_token(shape, length)
    skipped_half = 6 * length * shape.heads * shape.head_size * shape.layers
    return {
        "causal attention": causal,
        "full attention": causal + skipped_half,
        "6 per parameter": 6.0 * shape.parameters,
    }


def _describe_contradiction(
    pairs: Sequence[tuple[float, float]], shares: Mapping[str, float], unit: str, rounding: float
) -> str:
    """Return how a claim differs from the steps by the convention that it is nearest to; empty if it does not."""
    claimed = statistics.median(claim for claim, _ in pairs)
    derived = {
        convention: statistics.median(share / time_s for _, time_s in pairs) for convention, share in shares.items()
    }
    convention = min(derived, key=lambda name: abs(claimed / derived[name] - 1))
    low, high = _tenth_and_ninetieth([shares[convention] / time_s for _, time_s in pairs])
    error = claimed / derived[convention] - 1
    if abs(error) <= CLAIM_TOLERANCE or low - rounding <= claimed <= high + rounding:
        return ""
    counted = f", counting {convention}" if convention else ""
    steps = f"{len(pairs)} measured steps give" if len(pairs) > 1 else "1 measured step gives"
    rate = _format(derived[convention])
    return f"the program claims {_format(claimed)} {unit}, its {steps} {rate}{counted} ({error:+.0%})"


def _tenth_and_ninetieth(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
