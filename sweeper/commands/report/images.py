"""The report's images for print: the panels of each kind of work, and each Pareto front."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sweeper.commands.report.fronts import SweepFront
from sweeper.commands.report.platform_panels import build_chart
from sweeper.pages.chart_style import load_pyplot
from sweeper.pages.front_plot import draw_front
from sweeper.pages.image import DPI, draw_image
from sweeper.results.ranking import BestResult, group_by_work, sort_by_platform

PANEL_WIDTH_IN = 5.2
MIN_PANEL_HEIGHT_IN = 3.4


def write_images(results: Sequence[BestResult], fronts: Sequence[SweepFront], path: Path) -> Iterator[Path]:
    """Write an image for each kind of work and each front, and yield its path: `path` with the content in its name."""
    for work, work_results in group_by_work(results).items():
        chart = build_chart(work, sort_by_platform(work_results))
        panel_in = (PANEL_WIDTH_IN, max(MIN_PANEL_HEIGHT_IN, 1.8 + 0.3 * len(work_results)))
        columns = 3 if len(chart.figures) > 1 else 1
        yield _save(draw_image(chart.figures, columns, panel_in, work, chart.note), path, work)
    for front in fronts:
        yield _save(draw_front(front.plot), path, f"front {front.sweep}")


def _save(image: Any, path: Path, content: str) -> Path:
    path = path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.]+', '_', content).strip('_')}.png")
    image.savefig(path, dpi=DPI, bbox_inches="tight")
    load_pyplot().close(image)
    return path
