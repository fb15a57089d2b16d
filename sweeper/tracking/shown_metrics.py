"""The metrics that MLflow's pages list first: the objectives and the usual ones, under names with units, rounded.

MLflow lists the metrics of a run, and of runs that are compared, in the order in which they were logged.
"""

import math
import re
from collections.abc import Mapping, Sequence

from sweeper.common.format import round_to_interval
from sweeper.metrics.derivation import EFFICIENCY, MEMORY_METRICS
from workloads.api.metrics import COST, get_metric

# After the objectives: rates, their shares of the peak and of the reached rate, memory, money, energy.
USUAL = ("tokens_per_s", "tflops", "mfu", "mamf_utilization", *MEMORY_METRICS, COST, *EFFICIENCY)
FINAL = "final "  # the prefix of what was measured in the finals


def shown_name(name: str, prefix: str = "") -> str:
    """Return the name of a metric in MLflow's pages: that of tables, a speed's unit alone, where MLflow allows it."""
    metric = get_metric(name)
    heading = (
        (metric.unit if metric.speed and metric.unit else metric.heading).replace("%", "percent").replace("/", " per ")
    )
    return prefix + (heading if re.fullmatch(r"[\w. ]+", heading) else name)


def varying_metrics(trials: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the usual metrics in which these trials differ, of energy one."""
    varying = [name for name in USUAL if len({metrics.get(name) for metrics in trials}) > 1]
    left_out = [name for name in varying if name in EFFICIENCY][1:]
    return [name for name in varying if name not in left_out]


def shown_metrics(metrics: Mapping[str, float], names: Sequence[str], prefix: str = "") -> dict[str, float]:
    """Return those of these metrics that a trial has, by the names of pages and in the units of tables.

    They are rounded to what their intervals support. A share of a rate has the relative interval of that rate.
    """
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
