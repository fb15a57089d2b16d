"""Write the report's images for print: panels for each kind of work, and one image per Pareto front."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sweeper.commands.report.fronts import SweepFront
from sweeper.commands.report.platform_panels import build_chart
from sweeper.pages.image import write_image
from sweeper.results.ranking import BestResult, group_by_work, sort_by_platform

PANEL_WIDTH_IN = 5.2
MIN_PANEL_HEIGHT_IN = 3.4
FRONT_PANEL_IN = (7.0, 5.5)


def write_images(results: Sequence[BestResult], fronts: Sequence[SweepFront], path: Path) -> Iterator[Path]:
    """Write an image for each kind of work and each front, and yield its path: `path` with the content in the name."""
    for work, work_results in group_by_work(results).items():
        chart = build_chart(work, sort_by_platform(work_results))
        panel_in = (PANEL_WIDTH_IN, max(MIN_PANEL_HEIGHT_IN, 1.8 + 0.3 * len(work_results)))
        columns = 3 if len(chart.figures) > 1 else 1
        work_path = _name(path, work)
        write_image(work_path, chart.figures, columns, panel_in, work, chart.note)
        yield work_path
    for front in fronts:
        chart = front.chart
        front_path = _name(path, f"front {front.sweep}")
        write_image(front_path, chart.figures, len(chart.figures), FRONT_PANEL_IN, chart.title)
        yield front_path


def _name(path: Path, content: str) -> Path:
    return path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.]+', '_', content).strip('_')}.png")
