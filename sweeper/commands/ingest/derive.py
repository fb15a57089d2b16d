"""Derive the metrics of imported results by this project's definitions, and compare them with the tool's claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sweeper.commands.ingest.devices import get_hardware
from sweeper.commands.ingest.imported import CLAIM_TOLERANCE, OUR_FLOPS, ImportedResult, drop_warmup
from sweeper.common.format import format_number
from sweeper.metrics import derivation
from workloads.api.contract import MIN_STEP_TIME_S, Measurement
from workloads.models.flops import model_flops_per_token
from workloads.models.model import TRAINED_MODELS

POWER_OF_TWO_TOLERANCE = 0.1  # a claimed rate may include the warm-up
MAX_LENGTH_FACTOR = 1024  # between the stated sequence length and one that explains a claim
FLOPS_CLAIMS = frozenset({"tflops", "tflops_per_gpu", "mfu", "hfu"})


def derive_metrics(result: ImportedResult) -> dict[str, float]:
    """Return what `sweeper.metrics.derivation` derives from the tokens and step times; empty without step times."""
    times_s = drop_warmup(result.step_times_s)
    derived = _derive(result, times_s, "median")
    if derived:
        derived["warmup_steps"] = float(len(result.step_times_s) - len(times_s))
    return derived


def _derive(result: ImportedResult, times_s: tuple[float, ...], statistic: str) -> dict[str, float]:
    if not times_s or not all(MIN_STEP_TIME_S <= time_s < math.inf for time_s in times_s):
        return {}
    hardware = get_hardware(result.device)
    measurement = Measurement(
        executed={},
        step_times_s=times_s,
        of_gang=True,
        statistic=statistic,
        tokens_per_step=result.tokens_per_step,
        flops_per_step=_flops_per_step(result),
        matrix_dtype=_matrix_dtype(result),
    )
    derived = derivation.derive([measurement] * (result.devices or 1), hardware.dense_peak_tflops if hardware else {})
    for rate in ("tokens_per_s", "tflops"):
        if result.devices and rate in derived:
            derived[f"{rate}_per_gpu"] = derived[rate] / result.devices
    return derived


def _matrix_dtype(result: ImportedResult) -> str:
    """Return the data type whose peak an MFU is a share of; empty in fp8, beside which some layers stay in bf16."""
    dtype = str(result.params.get("dtype", ""))
    return "" if dtype == "fp8" else dtype


def _flops_per_step(result: ImportedResult) -> float:
    """Return the FLOPs of a step; 0 where the model, the sequence length or the number of devices is not known."""
    length, model = result.params.get("sequence_length"), TRAINED_MODELS.get(str(result.params.get("model", "")))
    if not result.devices or model is None or not isinstance(length, (int, float)):
        return 0.0
    return result.tokens_per_step * model_flops_per_token(model, int(length))


def find_contradictions(result: ImportedResult, derived: Mapping[str, float]) -> list[str]:
    """Return a message for everything about a result that cannot be true together."""
    contradictions = [*result.contradictions, *find_disagreements(result)]
    if result.feasible and not derived:
        contradictions.append(f"a step takes {min(result.step_times_s, default=0):g} s: no step does")
    if impossible := derivation.describe_impossible(derived):
        contradictions.append(impossible.partition(".")[0])
    return contradictions


def find_disagreements(result: ImportedResult) -> list[str]:
    """Return a message for each claim that differs by more than 5% from the same metric of the same steps.

    A rate and its value per GPU that differ by the same ratio give one message.
    """
    claims = result.claims
    derived = _derive(result, claims.step_times_s or drop_warmup(result.step_times_s), claims.statistic)
    ratios = {
        name: claim / derived[name]
        for name, claim in claims.values.items()
        if derived.get(name) and (claims.flops == OUR_FLOPS or name not in FLOPS_CLAIMS)
    }
    contradicted = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > CLAIM_TOLERANCE}
    total = contradicted.get("tokens_per_s")
    per_gpu = contradicted.get("tokens_per_s_per_gpu")
    if total is not None and per_gpu is not None and abs(per_gpu - total) <= CLAIM_TOLERANCE * total:
        del contradicted["tokens_per_s_per_gpu"]
    return list(_describe_disagreements(result, derived, contradicted))


def _describe_disagreements(
    result: ImportedResult, derived: dict[str, float], ratios: dict[str, float]
) -> Iterator[str]:
    for name, ratio in ratios.items():
        explanation = _suggest_sequence_length(result, ratio) if name.startswith("tokens_per_s") else ""
        yield (
            f"claimed {name} {format_number(result.claims.values[name])}, but the {result.claims.statistic} of the "
            f"same steps gives {format_number(derived[name])}{explanation}"
        )


def _suggest_sequence_length(result: ImportedResult, ratio: float) -> str:
    """Return the sequence length that would explain a claim which is off by about a power of two."""
    length = result.params.get("sequence_length")
    if not isinstance(length, (int, float)) or not 1 / MAX_LENGTH_FACTOR < ratio < MAX_LENGTH_FACTOR:
        return ""
    power = 2.0 ** round(math.log2(ratio))
    if power == 1 or abs(ratio / power - 1) > POWER_OF_TWO_TOLERANCE:
        return ""
    return f" (a sequence length of {length * power:,.0f} tokens would explain it)"
