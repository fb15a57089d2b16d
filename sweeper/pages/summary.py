"""The summary of a sweep when it ends: the best trials, failures, where everything is and how to go on."""

from __future__ import annotations

import io
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sweeper.common.format import TIE, count, format_duration, format_number, format_point
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.pages import per_gpu
from sweeper.pages import trial_tables as tables
from sweeper.pages.sweep_results import Results
from sweeper.pages.terminal import draw, terminal_width
from sweeper.preflight import corrections
from sweeper.search.finals import DEFAULT_FINALISTS
from sweeper.search.front import Front, select_finalists
from workloads.api.metrics import get_metric
from workloads.api.secrets import mask

SHOWN_ROWS = 10
SHOWN_OF_FRONT = 30
SHOWN_REASONS = 3  # of each bad status
SHOWN_OF_EXHAUSTED = 120  # trials of a space of which every point was tried


@dataclass(frozen=True)
class Recording:
    """The state of a sweep's record in MLflow.

    Attributes:
        uri: the store as configured; None for the default one.
        runs_page: the path of the sweep's runs in MLflow's pages.
        pending: records that are not written yet.
        error: why not.
        is_complete: everything is written.
    """

    uri: str | None
    runs_page: str
    pending: int
    error: str
    is_complete: bool


@dataclass(frozen=True)
class Summary:
    """The summary of a sweep.

    Attributes:
        command: runs or resumes the sweep.
        extend_command: extends it.
        retry_command: runs its failed trials again; empty if there are none.
        certify_command: measures the front of several objectives again; empty if that was done or is to be done.
        drained: a line for each node that was drained.
        stopped: why the sweep ended before its budget was used up, if it did.
    """

    results: Results
    command: str
    extend_command: str
    retry_command: str = ""
    certify_command: str = ""
    drained: Sequence[str] = ()
    stopped: str = ""

    @property
    def title(self) -> str:
        return f"{self.results.plan.config.workload.name} on {self.results.plan.target.model}"

    def markdown(self) -> str:
        """Return the summary for the parent run's page in MLflow."""
        results, shown = self.results, self._best_trials()
        rows = tables.trial_rows(shown, results.objective, results.other_objectives, results.front_numbers)
        best = tables.markdown_of(*rows) if shown else "no trial was complete"
        lines = [f"**{self.title}**: {tables.format_counts(results.counts)}", "", best, ""]
        if fixed := tables.fixed_parameters(results.records):
            lines += [f"Fixed: {format_point(fixed)}", ""]
        if missing := tables.missing_intervals(shown, results.objective):
            lines += [f"— no 95% interval: {missing}", ""]
        if common := tables.common_parameters(shown):
            lines += [f"Equal in all: {format_point(common)}", ""]
        if results.finalists:
            rows = tables.finalist_rows(results.finalists, results.objective)
            lines += [self.verdict(), "", tables.markdown_of(*rows), ""]
        if results.front:
            lines += [
                self.verdict(),
                "",
                tables.markdown_of(*tables.front_rows(results.front, self._metrics)),
                "",
            ]
        if results.gpus:
            lines += [per_gpu.describe(results.gpus), ""]
        for node in self.drained:
            lines += [f"drained: {node}", ""]
        return "\n".join([*lines, f"`{self.command}`"])

    def verdict(self) -> str:
        """Return the winner of the finals or the trials that tie; empty without finals."""
        if self.results.front:
            return self._describe_front(self.results.front)
        if not self.results.finalists:
            return ""
        leader, *others = self.results.finalists
        if leader.exceeded:
            finalists = count(len(self.results.finalists), "finalist")
            return f"no winner: {finalists} beyond a limit by the median of {leader.rounds} rounds"
        if not others:
            return f"no verdict: only trial {leader.trial.number} was measured again"
        value = f"{format_number(leader.value.value)} {get_metric(self.results.objective).unit}".strip()
        interval = f"95% {format_number(leader.value.low)} to {format_number(leader.value.high)}"
        method = f"mean of {leader.rounds} rounds in turns with the others"
        tied = [finalist.trial.number for finalist in others if finalist.tied]
        if not tied:
            return f"trial {leader.trial.number} wins: {value} ({interval}; {method})"
        numbers = ", ".join(map(str, [leader.trial.number, *tied]))
        return f"{TIE}: trials {numbers} cannot be told apart; {value} ({interval}; {method})"

    def _describe_front(self, front: Front) -> str:
        """Return the trials of the front and how sure they are."""
        numbers, certified = front.numbers, front.certified
        text = f"front of {count(len(numbers), 'trial')}: {', '.join(map(str, numbers))}"
        if not certified:
            return f"{text}; not certified: each was measured once{self._how_to_certify()}"
        text += f"; {len(certified)} measured again in {certified[0].rounds} rounds"
        unsure = [point.trial.number for point in certified if point.verdict == "not sure"]
        exceeding = [point.trial.number for point in certified if point.exceeded]
        for what, found in (("not sure of", unsure), ("beyond a limit", exceeding)):
            text += f"; {what} {', '.join(map(str, found))}" if found else ""
        return text

    def _how_to_certify(self) -> str:
        """Return the setting by which the next run measures the front again; empty where this one was to do it."""
        finals = self.results.plan.config.finals
        if finals.top:
            return ""
        points = select_finalists(self.results.best, self.results.plan.criteria, DEFAULT_FINALISTS)
        seconds = finals.rounds * sum(trial.ended_at_s - trial.started_at_s for trial in points)
        duration = f"about {format_duration(seconds)}"
        return f"; finals.top={DEFAULT_FINALISTS} measures {len(points)} in {finals.rounds} rounds, {duration}"

    @property
    def _metrics(self) -> Sequence[str]:
        return self.results.plan.criteria.metrics

    def _best_trials(self) -> Sequence[TrialRecord]:
        """Return the best trials, of several objectives at least the front."""
        return self.results.best[: max(SHOWN_ROWS, min(len(self.results.front_numbers), SHOWN_OF_FRONT))]

    def print(self, recording: Recording, *, is_over: bool, is_exhausted: bool) -> None:
        """Print to standard output.

        Args:
            is_over: the budget is used up.
            is_exhausted: every point of the space was tried.
        """
        # Written in one piece at the end: rich ends the process itself if a pipe is closed early.
        text = io.StringIO()
        width = terminal_width()
        out = Console(file=text, width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)
        out.print(f"\n{self.title}: {tables.format_counts(self.results.counts)}")
        self._print_trials(out, is_exhausted)
        for line in self._notes():
            out.print(line)
        for line in self._locations(recording):
            out.print(line)
        for line in self._next_steps(is_over, is_exhausted):
            out.print(line)
        print(text.getvalue(), end="", flush=True)

    def _next_steps(self, is_over: bool, is_exhausted: bool) -> list[str]:
        """Return why the sweep stopped, if it did, and the commands that go on."""
        lines = [f"stopped  {self.stopped}"] if self.stopped else []
        if self.retry_command and (is_over or self.retry_command != self.command):
            lines.append(f"retry    {self.retry_command}")
        if self.certify_command:
            lines.append(f"certify  {self.certify_command}")
        if not is_over:
            lines.append(f"resume   {self.command}")
        elif is_exhausted:
            lines.append("done     every point of the space was tried")
        else:
            lines.append(f"extend   {self.extend_command}")
        return lines

    def _print_trials(self, out: Console, is_exhausted: bool) -> None:
        """Print the tables of the search and of the finals."""
        results = self.results
        if fixed := tables.fixed_parameters(results.records):
            out.print(f"fixed    {format_point(fixed)}")
        if shown := self._shown_trials(is_exhausted):
            others, front = results.other_objectives, results.front_numbers
            out.print(tables.draw_trials(shown, results.objective, out.width, others, front))
            if missing := tables.missing_intervals(shown, results.objective):
                out.print(f"—        no 95% interval: {missing}")
            if common := tables.common_parameters(shown):
                out.print(f"equal    {format_point(common)}")
        if results.finalists:
            heading, cells = tables.finalist_rows(results.finalists, results.objective)
            out.print(f"finals   {self.verdict()}")
            out.print(draw(heading, cells, len(heading) - 5, out.width))  # intervals if there is room
        if results.front:
            out.print(f"front    {self.verdict()}")
            if results.front.certified:
                out.print(tables.draw_front(results.front, self._metrics, out.width))

    def _notes(self) -> list[str]:
        """Return the lines below the tables: finals, estimates, GPUs, nodes, unranked trials and failures."""
        results = self.results
        lines = self._failed_finals()
        if quality := results.prediction_quality():
            lines.append(f"model    {_describe_quality(quality)}")
        if results.correction:
            lines.append(f"         {results.correction.describe()}; kept for later plans in {corrections.FILE}")
        if results.gpus:
            lines.append(f"GPUs     {per_gpu.describe(results.gpus)}")
        lines += [f"drained  {node}" for node in self.drained]
        lines += _describe_kinds("not ranked by speed", _group_by_reason(self._unranked()))
        infeasible = [record for record in results.records if record.status is TrialStatus.INFEASIBLE]
        lines += _describe_kinds("infeasible", _group_by_reason(infeasible))
        return lines + self._failures() + self._earlier_attempts()

    def _shown_trials(self, is_exhausted: bool) -> Sequence[TrialRecord]:
        """Return the best trials; of a small exhausted space all of them, unranked ones last."""
        ranked_first = [*self.results.best, *self._unranked()]
        if is_exhausted and len(ranked_first) <= SHOWN_OF_EXHAUSTED:
            return ranked_first
        return self._best_trials() or ranked_first[:SHOWN_ROWS]

    def _unranked(self) -> list[TrialRecord]:
        """Return the complete trials that have no speed to rank."""
        objective = self.results.objective
        return [r for r in self.results.records if r.status is TrialStatus.COMPLETE and objective not in r.metrics]

    def _failed_finals(self) -> list[str]:
        """Return a line if trials of the finals did not complete, with an example."""
        finals = [r for r in self.results.remeasured if r.remeasurement and r.remeasurement.group]
        failed = [r for r in finals if r.status not in (TrialStatus.COMPLETE, TrialStatus.CANCELLED)]
        if not failed:
            return []
        last = failed[-1]
        assert last.remeasurement is not None
        return [
            f"finals   {len(failed)} of {count(len(finals), 'trial')} did not complete; example: trial {last.number} "
            f"(remeasuring {last.remeasurement.trial}), {last.status.value}: {last.reason}"
        ]

    def _failures(self) -> list[str]:
        """Return an example of each kind of failure, with its log."""
        lines = []
        for status in (TrialStatus.FAILED, TrialStatus.LOST, TrialStatus.TIMED_OUT):
            kinds = _group_by_reason([record for record in self.results.records if record.status is status])
            if len(kinds) > SHOWN_REASONS:
                lines.append(f"{status.value} for {len(kinds)} reasons, the most frequent ones below: see trials.csv")
            for records in kinds[:SHOWN_REASONS]:
                last = records[-1]
                lines.append(f"{len(records)} {status.value}; example: trial {last.number}: {last.reason}")
                if (path := self.results.plan.last_lines_path(last.number)).exists():
                    lines.append(f"         its last lines: {relative_path(path)}")
                elif last.where.get("log"):
                    lines.append(f"         log {last.where['node']}:{last.where['log']}")
        return lines

    def _earlier_attempts(self) -> list[str]:
        """Return a line if trials were retried."""
        if not (number := len(self.results.earlier_attempts)):
            return []
        return [f"retried  {count(number, 'trial')}; the earlier attempts are kept in trials.csv and in MLflow"]

    def _locations(self, recording: Recording) -> list[str]:
        """Return where the results, the plots and the MLflow runs are."""
        folder = self.results.plan.folder
        lines = [f"results  {relative_path(folder / 'trials.csv')}"]
        if (folder / "plots" / "plots.html").exists():
            lines.append(f"plots    {relative_path(folder / 'plots' / 'plots.html')}")
        if (folder / "best").exists():
            lines.append(
                f"winner   python -m sweeper best {folder.name}   (its files: {relative_path(folder / 'best')})"
            )
        if recording.is_complete:
            return lines + self._review(recording)
        trials = len(self.results.records) + len(self.results.remeasured)
        reason = recording.error or "it has not answered yet"
        return [
            *lines,
            f"MLflow   {recording.pending} of {trials} results are not written ({reason}); they are kept, and the same "
            "command writes them",
        ]

    def _review(self, recording: Recording) -> list[str]:
        """Return the command that shows the runs in a browser, if one is needed, and the address of the runs."""
        uri, page = recording.uri, recording.runs_page
        if uri and uri.startswith("http"):
            return [f"review   {mask(uri).rstrip('/')}{page}"]
        directory = self.results.plan.directory
        change_directory = "" if directory == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
        store = f" --backend-store-uri {shlex.quote(mask(uri))}" if uri else ""
        return [f"review   {change_directory}{_mlflow_command()} ui{store}", f"         http://127.0.0.1:5000{page}"]


def _group_by_reason(records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    """Return the trials by kind of reason, the most frequent first."""
    kinds: dict[str, list[TrialRecord]] = {}
    for record in records:
        kinds.setdefault(record.kind_of_reason, []).append(record)
    return sorted(kinds.values(), key=len, reverse=True)


def _describe_kinds(heading: str, kinds: Sequence[Sequence[TrialRecord]]) -> list[str]:
    """Return a line for each kind of reason, with an example where the reasons differ."""
    lines = []
    for records in kinds[:SHOWN_ROWS]:
        example = "; example" if len({record.reason for record in records}) > 1 else ""
        lines.append(f"{len(records)} {heading}{example}: {records[-1].reason}")
    if len(kinds) > SHOWN_ROWS:
        lines.append(f"{heading} for {len(kinds) - SHOWN_ROWS} more reasons: see trials.csv")
    return lines


def _mlflow_command() -> str:
    """Return MLflow's command as a person can type it here."""
    if shutil.which("mlflow"):
        return "mlflow"
    beside_python = Path(sys.executable).with_name("mlflow")
    if beside_python.exists():
        return relative_path(beside_python)
    return f"{relative_path(Path(sys.executable))} -m mlflow"


def _describe_quality(quality: dict[str, float]) -> str:
    """Return how far the estimates were off and how well they ordered the trials."""
    error = quality["predicted_error"]
    distance = f"{error:.1%} off" if error < 1 else f"{1 + error:.0f} times the measured values"
    text = f"estimates are {distance} (median of the trials)"
    if "predicted_order" in quality:
        text += f"; rank correlation {quality['predicted_order']:.2f}"
    return text


def relative_path(path: Path) -> str:
    """Return the path relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
