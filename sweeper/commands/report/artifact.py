"""Build the report as an HTML page, log a sweep's page to its parent run, and link to it in the description.

    MLFLOW_TRACKING_URI=URI python -m sweeper.commands.report.artifact PARENT_RUN_ID

The recording process runs this command after it has written all other results of a sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweeper.commands.report import charts, fronts, overview, report_tables
from sweeper.pages import html_page
from sweeper.pages.html_page import Table
from sweeper.results import mlflow_results
from sweeper.results.mlflow_results import Stored
from sweeper.tracking import mlflow_store
from workloads.api.secrets import mask

if TYPE_CHECKING:
    from mlflow import MlflowClient

REPORT = "report.html"


def build_page(title: str, stored: Stored, tables: Sequence[Table], found: Sequence[fronts.SweepFront]) -> str:
    """Return the report as HTML: the overview, the tables and the charts."""
    drawn = [*(front.chart for front in found), *charts.build_charts(stored)]
    return html_page.build_page(title, [*tables, *drawn], overview.describe(stored, found))


def log_report(client: MlflowClient, run_id: str) -> None:
    """Build the report on a parent run's sweep, and log the report to the run."""
    run = client.get_run(run_id)
    experiment_id = run.info.experiment_id
    stored = mlflow_results.of_study(client, experiment_id, run.data.tags[mlflow_store.STUDY])
    found = fronts.find_fronts(stored)
    tables = report_tables.build_tables(stored, None, [front.table for front in found])
    client.log_text(run_id, build_page(f"sweeper: {run.info.run_name}", stored, tables, found), REPORT)
    link = f"#/experiments/{experiment_id}/runs/{run_id}/artifacts/{REPORT}"  # works on every MLflow page
    description = client.get_run(run_id).data.tags.get(mlflow_store.DESCRIPTION, "")
    description += f"\n\nReport: [{REPORT}]({link}), among the artifacts"
    client.set_tag(run_id, mlflow_store.DESCRIPTION, description)


def main() -> None:
    """Run the command. The exit code is 1 if the report could not be logged."""
    from mlflow import MlflowClient  # takes seconds to import and is not needed for a report from SQLite

    try:
        log_report(MlflowClient(), sys.argv[1])
    except Exception as error:  # no error here matters: the sweep's results are already written
        print(mask(f"no {REPORT}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
