"""Choose the metrics that MLflow's pages list first: objectives and common metrics, rounded and named with units.

MLflow lists metrics in the order in which they were logged, both for a single run and in comparisons.
"""

import math
import re
from collections.abc import Mapping, Sequence

from sweeper.common.format import round_to_interval
from sweeper.metrics.derivation import EFFICIENCY, MEMORY_METRICS
from workloads.api.metrics import COST, get_metric

# Listed after the objectives: rates, shares of the peak and of the achieved rate, memory, cost, energy.
USUAL = ("tokens_per_s", "tflops", "mfu", "mamf_utilization", *MEMORY_METRICS, COST, *EFFICIENCY)
FINAL = "final "  # the prefix of metrics measured in the finals


def shown_name(name: str, prefix: str = "") -> str:
    """Return a metric's name on MLflow's pages: the heading or, for a speed, the unit, if MLflow allows that name."""
    metric = get_metric(name)
    heading = (
        (metric.unit if metric.speed and metric.unit else metric.heading).replace("%", "percent").replace("/", " per ")
    )
    return prefix + (heading if re.fullmatch(r"[\w. ]+", heading) else name)


def varying_metrics(trials: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the common metrics in which these trials differ, with at most one energy metric."""
    varying = [name for name in USUAL if len({metrics.get(name) for metrics in trials}) > 1]
    left_out = [name for name in varying if name in EFFICIENCY][1:]
    return [name for name in varying if name not in left_out]


def shown_metrics(metrics: Mapping[str, float], names: Sequence[str], prefix: str = "") -> dict[str, float]:
    """Return the metrics in `names` that a trial has, in the tables' units, keyed by their names on MLflow's pages.

    Each metric is rounded to the precision that its interval supports. A metric that is a share of a rate uses that
    rate's relative interval."""
    leading = next((name for name in ("tflops", *names) if f"{name}_ci_low" in metrics and metrics[name]), "")
    shown = {}
    for name in dict.fromkeys(filter(metrics.__contains__, names)):
        metric, value = get_metric(name), metrics[name]
        source = leading if metric.is_rate and f"{name}_ci_low" not in metrics else name
        width = metrics.get(f"{source}_ci_high", math.nan) - metrics.get(f"{source}_ci_low", math.nan)
        if source != name:
            width *= value / metrics.get(source, math.nan)
        page_name = shown_name(name, prefix)
        shown[prefix + name if page_name in shown else page_name] = round_to_interval(
            value * metric.factor, width * metric.factor / 2
        )
    return shown
