"""Log the report on one sweep as an artifact of its parent run, and name it in the run's description.

    MLFLOW_TRACKING_URI=URI python -m sweeper.commands.report.artifact PARENT_RUN_ID

The recording process runs it after everything else of a sweep is written.
"""

from __future__ import annotations

import sys

from mlflow import MlflowClient

from sweeper.commands.report import charts, fronts, overview, report_tables
from sweeper.pages import html_page
from sweeper.results import mlflow_results
from sweeper.tracking import mlflow_store
from workloads.api.secrets import mask

REPORT = "report.html"


def log_report(client: MlflowClient, run_id: str) -> None:
    """Build the report on the sweep whose parent run this is, and log it there."""
    run = client.get_run(run_id)
    experiment_id = run.info.experiment_id
    stored = mlflow_results.of_study(client, experiment_id, run.data.tags[mlflow_store.STUDY])
    found = fronts.find_fronts(stored)
    html = html_page.build_page(
        f"sweeper: {run.info.run_name}",
        report_tables.build_tables(stored, None, map(fronts.build_table, found)),
        [*map(fronts.build_chart, found), *charts.build_charts(stored)],
        overview.describe(stored, found),
    )
    client.log_text(run_id, html, REPORT)
    link = mlflow_store.artifact_link(experiment_id, run_id, REPORT)
    description = client.get_run(run_id).data.tags.get(mlflow_store.DESCRIPTION, "")
    description += f"\n\nReport: [{REPORT}]({link}), among the artifacts"
    client.set_tag(run_id, mlflow_store.DESCRIPTION, description)


def main() -> None:
    """Run the command line. Exit code 1 where the report could not be logged."""
    try:
        log_report(MlflowClient(), sys.argv[1])
    except Exception as error:  # of whatever kind: the sweep's results are written without it
        print(mask(f"no {REPORT}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
