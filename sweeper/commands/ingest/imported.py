"""Represent an imported result, derive its metrics by this project's definitions, and find contradictory values."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeper.common.format import format_number
from sweeper.config.catalogue import catalogue, find_hardware
from sweeper.config.schema import Hardware
from sweeper.metrics import derivation
from workloads.api.contract import MIN_STEP_TIME_S, Measurement
from workloads.models.flops import model_flops_per_token
from workloads.models.model import TRAINED_MODELS, Model

CLAIM_TOLERANCE = 0.05  # a claimed and a derived value contradict each other above this relative difference
MAX_COUNT = 10**15  # larger batches and sequence lengths are invalid
MAX_DEVICES = 10**6
WARMUP_RULE = "leading steps of more than 1.2 times the median of the second half are warm-up"
OUR_FLOPS = "causal"  # this project's convention for model FLOPs (docs/reference/metrics.md)
TRAINING_DTYPES = ("bf16", "fp16", "fp8")
POWER_OF_TWO_TOLERANCE = 0.1  # tolerant, because a claimed rate may include the warm-up
MAX_LENGTH_FACTOR = 1024  # the largest factor by which a suggested sequence length may differ from the stated one
FLOPS_CLAIMS = frozenset({"tflops", "tflops_per_gpu", "mfu", "hfu"})


@dataclass(frozen=True)
class Claims:
    """The metrics that the other tool itself reports."""

    values: dict[str, float] = field(default_factory=dict)  # by this project's metric names
    step_times_s: tuple[float, ...] = ()  # the steps that the values summarize; empty for all steps after the warm-up
    statistic: str = "median"  # the statistic over these steps, median or mean
    # the tool's FLOP convention in rates and utilizations; values are comparable only under the same convention
    flops: str = OUR_FLOPS


@dataclass(frozen=True)
class ImportedResult:
    name: str
    params: dict[str, Any]  # the configuration, including `model`, `dtype` and `sequence_length` if known
    step_times_s: tuple[float, ...] = ()
    step_resolution_s: float = 0.0  # the resolution to which the step times were rounded
    tokens_per_step: int = 0
    devices: int | None = None  # number of devices; None means unknown
    device: str = ""  # name of one device; empty means unknown
    feasible: bool = True
    model: Model | None = None  # set if the file has only the model's dimensions, or if the command names a model
    claims: Claims = field(default_factory=Claims)
    # measurements by the tool other than speed, such as memory
    metrics: dict[str, float] = field(default_factory=dict)
    machine_info: dict[str, Any] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()  # messages about contradictory values in the file
    notes: tuple[str, ...] = ()  # other remarks about the values


def drop_warmup(times_s: tuple[float, ...]) -> tuple[float, ...]:
    """Drop the warm-up, as defined by `WARMUP_RULE`, and return the other step times. At least one step is kept."""
    if len(times_s) < 2:
        return times_s
    limit_s = 1.2 * statistics.median(times_s[len(times_s) // 2 :])
    first = next(step for step, time_s in enumerate(times_s) if time_s <= limit_s)
    return times_s[first:]


def as_positive_int(value: object, most: int = MAX_COUNT) -> int | None:
    """Return `value` if it is an integer from 1 to `most`, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else None


def as_device_count(value: object) -> int | None:
    return as_positive_int(value, MAX_DEVICES)


def get_hardware(device: str) -> Hardware | None:
    """Look up a GPU in the catalog by catalog name or driver name. Return None for an unknown GPU."""
    return catalogue().get(device) or (find_hardware(device) if device else None)


def add_device(result: ImportedResult, path: Path, option: str) -> ImportedResult:
    """If a result has no device, add the device given to the command, or else the device in the file name."""
    named = find_device_in_name(path)
    if result.device or option or not named:
        return replace(result, device=result.device or option)
    return replace(result, device=named, notes=(*result.notes, f"the device is taken from the file's name: {named}"))


def find_device_in_name(path: Path) -> str:
    """Return the longest catalog device name that occurs in the file name; empty if none occurs."""
    name = f"_{re.sub(r'[^a-z0-9]+', '_', path.stem.lower())}_"
    return max((device for device in catalogue() if f"_{device}_" in name), key=len, default="")


def derive_metrics(result: ImportedResult) -> dict[str, float]:
    """Derive metrics from tokens and step times with `sweeper.metrics.derivation`. Return {} if no step is timed."""
    times_s = drop_warmup(result.step_times_s)
    derived = _derive(result, times_s, "median")
    return derived and {**derived, "warmup_steps": float(len(result.step_times_s) - len(times_s))}


def _derive(result: ImportedResult, times_s: tuple[float, ...], statistic: str) -> dict[str, float]:
    if not times_s or not all(MIN_STEP_TIME_S <= time_s < math.inf for time_s in times_s):
        return {}
    hardware, devices, params = get_hardware(result.device), result.devices, result.params
    length, model = params.get("sequence_length"), result.model or TRAINED_MODELS.get(str(params.get("model", "")))
    flops_per_token = 0.0
    if devices and model and isinstance(length, (int, float)):
        flops_per_token = model_flops_per_token(model, int(length))
    dtype = str(params.get("dtype", ""))
    measurement = Measurement(
        executed={},
        step_times_s=times_s,
        step_resolution_s=result.step_resolution_s,
        of_gang=True,
        statistic=statistic,
        tokens_per_step=result.tokens_per_step,
        flops_per_step=result.tokens_per_step * flops_per_token,
        matrix_dtype="" if dtype == "fp8" else dtype,  # no MFU for fp8, because some layers stay in bf16
    )
    derived = derivation.derive([measurement] * (devices or 1), hardware.dense_peak_tflops if hardware else {})
    for rate in ("tokens_per_s", "tflops"):
        if devices and rate in derived:
            derived[f"{rate}_per_gpu"] = derived[rate] / devices
    return derived


def find_contradictions(result: ImportedResult, derived: Mapping[str, float]) -> list[str]:
    """Return a message for each contradiction between values of a result. A claim contradicts the derived value of the
    same metric over the same steps if they differ by more than 5%. If a rate and the rate per GPU are off by the same
    factor, only one message is returned."""
    claims = result.claims
    ours = _derive(result, claims.step_times_s or drop_warmup(result.step_times_s), claims.statistic)
    ratios = {
        name: claim / ours[name]
        for name, claim in claims.values.items()
        if ours.get(name) and (claims.flops == OUR_FLOPS or name not in FLOPS_CLAIMS)
    }
    wrong = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > CLAIM_TOLERANCE}
    total, per_gpu = wrong.get("tokens_per_s"), wrong.get("tokens_per_s_per_gpu")
    if total is not None and per_gpu is not None and abs(per_gpu - total) <= CLAIM_TOLERANCE * total:
        del wrong["tokens_per_s_per_gpu"]
    contradictions = [*_find_impossible_claims(result)]
    contradictions += [
        f"claimed {name} {format_number(claims.values[name])}, but the {claims.statistic} of the same steps gives "
        f"{format_number(ours[name])}{_suggest_sequence_length(result, name, ratio)}"
        for name, ratio in wrong.items()
    ]
    if result.feasible and not derived:
        contradictions.append(f"a step takes {min(result.step_times_s, default=0):g} s: no step does")
    if impossible := derivation.describe_impossible(derived):
        contradictions.append(impossible.partition(".")[0])
    return [*result.contradictions, *contradictions]


def _find_impossible_claims(result: ImportedResult) -> Iterator[str]:
    claims, hardware = result.claims.values, get_hardware(result.device)
    peaks, dtype = hardware.dense_peak_tflops if hardware else {}, str(result.params.get("dtype", ""))
    # An unknown dtype may be fp8, so the highest peak is the limit.
    peak = peaks.get(dtype) or max((peaks.get(name) or 0.0 for name in TRAINING_DTYPES), default=0.0)
    tflops, mfu, bf16_peak = claims.get("tflops_per_gpu", 0.0), claims.get("mfu", 0.0), peaks.get("bf16")
    if tflops and peak and tflops > peak:
        of_dtype = f"dense {dtype} peak" if dtype in peaks else "highest dense peak"
        yield f"the claimed {format_number(tflops)} TFLOP/s are above the device's {of_dtype} of {format_number(peak)}"
    if mfu > 1:
        yield f"the stated MFU is {mfu:.1%}: no device computes more than its peak"
    elif mfu and tflops and bf16_peak and abs(mfu * bf16_peak / tflops - 1) > CLAIM_TOLERANCE:
        rate = f"{format_number(tflops)} TFLOP/s are {tflops / bf16_peak:.1%} of the dense bf16 peak"
        yield f"the stated MFU is {mfu:.1%}, but {rate}"


def _suggest_sequence_length(result: ImportedResult, name: str, ratio: float) -> str:
    length = result.params.get("sequence_length")
    is_rate = name.startswith("tokens_per_s") and 1 / MAX_LENGTH_FACTOR < ratio < MAX_LENGTH_FACTOR
    if not is_rate or not isinstance(length, (int, float)):
        return ""
    power = 2.0 ** round(math.log2(ratio))
    if power == 1 or abs(ratio / power - 1) > POWER_OF_TWO_TOLERANCE:
        return ""
    return f" (a sequence length of {length * power:,.0f} tokens would explain it)"
