"""Check a command's steps: the declared work, the printed work, and the speed that the program claims."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workloads.api.contract import Infeasible, Scalar
from workloads.api.metrics import find_source
from workloads.command import CommandSettings
from workloads.command.template import fill, fill_all
from workloads.formats.logs import DTYPES, Step
from workloads.formats.printed import Printed
from workloads.models.flops import model_flops_per_token
from workloads.models.model import TRAINED_MODELS
from workloads.tables import read_toml

# Tolerance of the printed parameter count: a small tokenizer removes a seventh of Llama 3 8B's parameters.
PARAMETER_TOLERANCE = 0.2
LOW_PRECISION = ("fp8", "mxfp8", "fp4", "mxfp4", "nvfp4")  # GEMM formats; other operations are in bf16
# Sizes to compare if a parameter, the layout or the settings declare them.
SIZES = ("global_batch", "sequence_length", "micro_batch", "tp", "pp", "cp", "dp", "dp_shard", "dp_replicate", "gpus")
SHAPE_SIZES = ("layers", "hidden_size", "intermediate_size", "heads")  # fields of `Model`
CLAIM_TOLERANCE = 0.05
CLAIMS, UNITS, CONVENTIONS = (read_toml(__file__, "claims.toml")[name] for name in ("rates", "units", "conventions"))


@dataclass(frozen=True)
class DeclaredWork:
    """A step's work as declared by the settings and parameters. 0 and empty values mean "not declared"."""

    global_batch: int
    sequence_length: int
    model: str
    dtype: str
    sizes: Mapping[str, tuple[Scalar, str]]  # the declared sizes among `SIZES`, each with the key that declares it

    def tokens(self, metrics: Mapping[str, float], reported_config: Mapping[str, Scalar]) -> tuple[int, int]:
        """Return the tokens per step and per sequence; 0 if unknown.

        An undeclared size is taken from the program's output. A printed step takes precedence over the configuration,
        because a step is smaller than configured while the batch ramps up.
        """
        global_batch, length = (
            declared or int(metrics.get(name, 0)) or _positive_int(reported_config.get(name))
            for name, declared in (("global_batch", self.global_batch), ("sequence_length", self.sequence_length))
        )
        return global_batch * length, length

    def with_rate(self, step: Step, reported_config: Mapping[str, Scalar]) -> dict[str, float]:
        """Return a step's metrics, including tokens/s, computed from tokens and time or as printed."""
        tokens, _ = self.tokens(step.metrics, reported_config)
        rate, time_s = step.metrics.get("tokens_per_s"), step.metrics.get("step_time_s", 0.0)
        if time_s > 0 and tokens:
            rate = tokens / time_s
        return mark_claims(step.metrics) | ({} if rate is None else {"tokens_per_s": rate})

    def find_differences(
        self, printed: Mapping[str, Sequence[Printed]], of_steps: Mapping[str, Sequence[Printed]]
    ) -> list[str]:
        """Return a phrase for each declared value that the program contradicts.

        At least one `printed` value must equal the declared value, because a nested configuration may contain a name
        twice. All values in `of_steps`, which come from measured step lines, must equal the declared value.
        """
        differences = []
        for name, (declared, key) in self.sizes.items():
            others = [value for value in of_steps.get(name, ()) if value != declared]
            if not others and declared not in printed.get(name, [declared]):
                others = list(printed[name])
            if others:
                differences.append(f"{name}={_join(others)}, requested {declared} ({key})")
        if self.model:
            shape, declared = TRAINED_MODELS[self.model], f"requested {self.model} (command.model)"
            known = {_plain(name) for name in TRAINED_MODELS}
            names = [name for name in printed.get("model", ()) if _plain(name) in known]
            if names and _plain(self.model) not in map(_plain, names):
                differences.append(f"model={_join(names)}, {declared}")
            sizes = printed.get("model_size", ())
            if sizes and not any(_plain(self.model).endswith(_plain(size)) for size in sizes):
                differences.append(f"model of {_join(sizes)}, {declared}")
            for name in SHAPE_SIZES:
                if name in printed and getattr(shape, name) not in printed[name]:
                    differences.append(f"{name}={_join(printed[name])}, {declared} has {getattr(shape, name)}")
            counts = [count for count in printed.get("parameters", ()) if isinstance(count, int)]
            if counts and not any(abs(count / shape.parameters - 1) <= PARAMETER_TOLERANCE for count in counts):
                differences.append(f"{_join(counts)} parameters, {declared} has {shape.parameters:,}")
        dtypes = self._find_other_dtypes(printed)
        return differences + [f"{other}, requested {self.dtype} (command.dtype)" for other in dtypes]

    def _find_other_dtypes(self, printed: Mapping[str, Sequence[Printed]]) -> Iterator[str]:
        # torchtitan 0.2.2 prints a line when it disables mixed precision, which needs FSDP
        # (torchtitan/distributed/utils.py, maybe_enable_amp). With fp32 weights, torchtitan then computes in fp32.
        is_disabled = "none" in printed.get("mixed_precision", ()) and "fp32" in printed.get("weights_dtype", ())
        if is_disabled and self.dtype not in ("", "fp32", "tf32"):
            yield "dtype=fp32, since mixed precision is disabled without FSDP"
        formats, own = printed.get("fp8", ()), self.dtype.lower()
        dtype = {"tf32": "fp32"}.get(self.dtype, DTYPES.get(self.dtype, ""))
        if own.startswith(LOW_PRECISION):
            # The names may give a format with or without its scales: fp8 and fp8_rowwise.
            same = [f for f in map(str, formats) if f == "fp8" or own.startswith(f) or f.startswith(own)]
            if formats and not same:
                yield f"fp8={_join(formats)}"
        elif dtype and formats and "none" not in formats:
            yield f"dtype={_join(formats)}"
        elif dtype and "dtype" in printed and dtype not in printed["dtype"]:
            yield f"dtype={_join(printed['dtype'])}"


def mark_claims(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, with the prefix claimed_ for metrics that this project derives itself."""
    return {f"claimed_{name}" if find_source(name) else name: value for name, value in metrics.items()}


def read_declared_work(
    settings: CommandSettings, parameters: Mapping[str, Scalar], placeholders: Mapping[str, Scalar]
) -> DeclaredWork:
    """Fill in the settings' templates. Raises Infeasible if a size is not a whole number or the model is unknown."""
    values = {**parameters, **placeholders}
    sizes = {name: (parameters[name], f"space.{name}") for name in SIZES if name in parameters}
    layout = fill_all(settings.layout, values)
    sizes |= {name: (value, f"command.layout.{name}") for name, value in layout.items() if name in SIZES}
    of_step = {}
    for name in ("global_batch", "sequence_length"):
        text = fill(getattr(settings, name), values)
        if text and not text.isdigit():
            raise Infeasible(f"command.{name}={text}: it has to be a whole number")
        of_step[name] = int(text or 0)
        if text:
            sizes[name] = (int(text), f"command.{name}")
    sizes["gpus"] = (placeholders["world_size"], "gpus")
    model = fill(settings.model, values)
    if model and model not in TRAINED_MODELS:
        raise Infeasible(f"command.model={model}: it has to be one of {', '.join(TRAINED_MODELS)}")
    comparable = {name: entry for name, entry in sizes.items() if _positive_int(entry[0])}  # -1: the program chooses
    return DeclaredWork(**of_step, model=model, dtype=fill(settings.dtype, values), sizes=comparable)


def _plain(name: Printed) -> str:
    """Reduce a model's name to letters and digits, which makes llama3_8b, Llama-3-8B and `llama3 8B` equal."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def _join(values: Sequence[Printed]) -> str:
    return " and ".join(f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value) for value in values)


def _positive_int(value: Scalar) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def find_contradictions(
    steps: Sequence[Step], work: DeclaredWork, tokens: int, length: int, gpus: int, program: str
) -> list[str]:
    """Return a phrase for each claim that the measured steps contradict.

    The median claimed rate is compared with the median measured rate of the steps that print the claim. The steps
    contradict the claim if the claim is off by more than `CLAIM_TOLERANCE` and outside the 10th to 90th percentile of
    these rates. TFLOP/s claims need a model and are compared under each convention that the program may follow
    (`program` is a `LogReader.kind`). The phrase names the convention nearest to the claim.
    """
    per_step = {"tokens": {"": float(tokens)} if tokens else {}, "flops": {}}
    if tokens and work.model:
        flops = flops_per_token(work.model, length)
        conventions = CONVENTIONS.get(program, tuple(flops))
        per_step["flops"] = {convention: flops[convention] * tokens / 1e12 for convention in conventions}
    phrases = []
    for name, (kind, is_per_gpu) in CLAIMS.items():
        pairs = [
            (step.metrics[name], step.metrics["step_time_s"])
            for step in steps
            if name in step.metrics and step.metrics.get("step_time_s", 0.0) > 0
        ]
        shares = {convention: amount / (gpus if is_per_gpu else 1) for convention, amount in per_step[kind].items()}
        if not pairs or not shares:
            continue
        claimed = statistics.median(claim for claim, _ in pairs)
        rates = {convention: [share / time_s for _, time_s in pairs] for convention, share in shares.items()}
        derived = {convention: statistics.median(values) for convention, values in rates.items()}
        convention = min(derived, key=lambda name: abs(claimed / derived[name] - 1))
        values, error = rates[convention], claimed / derived[convention] - 1
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 2
        unit, rounding = UNITS[kind]
        if abs(error) <= CLAIM_TOLERANCE or low - rounding <= claimed <= high + rounding:
            continue
        unit += " a GPU" if is_per_gpu and gpus > 1 else ""
        counted = f", counting {convention}" if convention else ""
        give = f"{len(pairs)} measured steps give" if len(pairs) > 1 else "1 measured step gives"
        claim, rate = (f"{r:,.0f}" if r >= 100 else f"{r:.3g}" for r in (claimed, derived[convention]))
        phrases.append(f"the program claims {claim} {unit}, its {give} {rate}{counted} ({error:+.0%})")
    return phrases


def flops_per_token(model: str, length: int) -> Mapping[str, float]:
    """Return the FLOPs per token that each convention counts for training."""
    shape = TRAINED_MODELS[model]
    causal = model_flops_per_token(shape, length)
    skipped_half = 6 * length * shape.heads * shape.head_size * shape.layers
    return {
        "causal attention": causal,
        "full attention": causal + skipped_half,
        "6 per parameter": 6.0 * shape.parameters,
    }
