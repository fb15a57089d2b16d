"""Print the summary of a sweep: the best trials, failures, where the results are, and how to continue."""

import io
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sweeper.common.format import TIE, count, format_duration, format_interval, format_number, format_point
from sweeper.common.grouping import group_values
from sweeper.common.trials import WITHOUT_RESULT, TrialRecord, TrialStatus
from sweeper.metrics.intervals import Interval
from sweeper.pages import per_gpu
from sweeper.pages import trial_tables as tables
from sweeper.pages.sweep_results import PLOTS, Results
from sweeper.pages.terminal import draw, open_console, wrap_line
from sweeper.preflight import corrections
from sweeper.results.stored import best_command
from sweeper.search.finals import DEFAULT_FINALISTS, describe_disturbed, lack_of_rounds
from sweeper.search.front import Front, select_finalists
from workloads.api.metrics import choose_summary, get_metric
from workloads.api.secrets import mask

SHOWN_ROWS = 10
SHOWN_OF_FRONT = 30
SHOWN_REASONS = 3  # the number of reasons to show for each bad status
SHOWN_OF_EXHAUSTED = 120  # if every point was tried, show all trials up to this number


@dataclass(frozen=True)
class Recording:
    """The state of recording a sweep in MLflow: complete, or with `pending` records still to be written.

    `uri` is the configured store, or None for the default store. `runs_page` is a path in MLflow's web UI.
    """

    uri: str | None
    runs_page: str
    pending: int
    error: str
    is_complete: bool
    refused: Mapping[int, str] = field(default_factory=dict)  # why MLflow permanently rejects a trial, by number


@dataclass(frozen=True)
class Summary:
    results: Results
    command: str  # to run or resume the sweep
    extend_command: str  # to extend the sweep
    ended_by: str = ""  # the limits of the budget that were reached
    retry_command: str = ""  # to rerun failed trials; empty if there are none
    certify_command: str = ""  # to remeasure the front; empty if finals have done or will do so
    drained: Sequence[str] = ()  # a line for each node that was drained
    stopped: str = ""  # why the sweep ended before its budget was used up; empty if it did not

    @property
    def title(self) -> str:
        return f"{self.results.plan.config.workload.title} on {self.results.plan.target.model}"

    def markdown(self) -> str:
        """Return the summary for the parent run's MLflow page."""
        results, shown = self.results, self._best_trials()
        rows = tables.trial_rows(shown, results.objective, results.other_objectives, results.front_numbers)
        paragraphs = [f"**{self.title}**: {tables.format_counts(results.counts)}"]
        paragraphs.append(tables.markdown_of(rows.heading, rows.cells) if shown else "no trial was complete")
        if fixed := tables.fixed_parameters(results.records):
            paragraphs.append(f"Fixed: {format_point(fixed)}")
        if missing := tables.missing_intervals(shown, results.objective):
            paragraphs.append(missing)
        if common := tables.common_parameters(shown):
            paragraphs.append(f"Equal in all: {format_point(common)}")
        again = None
        if results.finalists:
            again = tables.finalist_rows(results.finalists, results.objective)
        elif results.front:
            again = tables.front_rows(results.front, results.plan.criteria.metrics)
        if again:
            paragraphs += [self.verdict(), tables.markdown_of(again.heading, again.cells)]
        paragraphs += [per_gpu.describe(results.gpus)] if results.gpus else []
        return "\n\n".join([*paragraphs, *(f"drained: {node}" for node in self.drained), f"`{self.command}`"])

    def verdict(self) -> str:
        """Describe the winner of the finals, the tied trials, or the trials on the front, or return "" without finals.
        For a front, the description includes how certain the front is, or which setting would remeasure it."""
        results = self.results
        if results.front:
            return self._describe_front(results.front)
        if not results.finalists:
            return ""
        leader, *others = results.finalists
        if leader.exceeded:
            finalists = count(len(results.finalists), "finalist")
            return f"no winner: {finalists} beyond a limit by the median of {leader.rounds} rounds"
        if not others:
            return f"no verdict: only trial {leader.trial.number} was measured again{describe_disturbed([leader])}"
        value = f"{format_number(leader.value.value)} {get_metric(results.objective).unit}".strip()
        interval = format_interval(leader.value.low, leader.value.high)
        method = f"mean of {leader.rounds} rounds, interleaved with the others{lack_of_rounds(leader.rounds)}"
        measured = f"{value} ({f'95% {interval}; ' if interval else ''}{method}){describe_disturbed(results.finalists)}"
        tied = [finalist.trial.number for finalist in others if finalist.tied]
        if not tied:
            return f"trial {leader.trial.number} wins: {measured}"
        numbers = ", ".join(map(str, [leader.trial.number, *tied]))
        return f"{TIE} of trials {numbers}: {measured}"

    def _describe_front(self, front: Front) -> str:
        certified = front.certified
        text = f"front of {count(len(front.numbers), 'trial')}: {', '.join(map(str, front.numbers))}"
        if certified:
            text += f"; {len(certified)} measured again in {certified[0].rounds} rounds"
            text += lack_of_rounds(certified[0].rounds)
            unsure = [point.trial.number for point in certified if point.verdict == "not sure"]
            exceeding = [point.trial.number for point in certified if point.exceeded]
            for what, found in (("not sure of", unsure), ("beyond a limit", exceeding)):
                text += f"; {what} {', '.join(map(str, found))}" if found else ""
            return text
        text += "; not certified: each was measured once"
        finals, best = self.results.plan.config.finals, self.results.best
        if finals.top:  # this run should already have measured the front
            return text
        points = select_finalists(best, self.results.plan.criteria, DEFAULT_FINALISTS)
        seconds = finals.rounds * sum(trial.duration_s for trial in points)
        again = f"measures {len(points)} in {finals.rounds} rounds, about {format_duration(seconds)}"
        return f"{text}; finals.top={DEFAULT_FINALISTS} {again}"

    def _best_trials(self) -> Sequence[TrialRecord]:
        return self.results.best[: max(SHOWN_ROWS, min(len(self.results.front_numbers), SHOWN_OF_FRONT))]

    def print(self, recording: Recording, *, is_over: bool, is_exhausted: bool) -> None:
        """Print the best trials (or all trials of a small exhausted space) and the notes to standard output. `is_over`
        means that the budget is used up. `is_exhausted` means that every point of the space was tried."""
        # Write the text in one piece at the end, because rich exits the process if a pipe is closed early.
        results, text = self.results, io.StringIO()
        out = open_console(text)
        out.print(f"\n{self.title}: {tables.format_counts(results.counts)}")
        if fixed := tables.fixed_parameters(results.records):
            out.print(wrap_line(f"fixed    {format_point(fixed)}", out.width))
        every = [*results.best, *self._unranked]
        is_small = is_exhausted and len(every) <= SHOWN_OF_EXHAUSTED
        if shown := every if is_small else self._best_trials() or every[:SHOWN_ROWS]:
            others, front = results.other_objectives, results.front_numbers
            out.print(draw(*tables.trial_rows(shown, results.objective, others, front), out.width))
            if missing := tables.missing_intervals(shown, results.objective):
                out.print(wrap_line(f"95%      {missing}", out.width))
            if common := tables.common_parameters(shown):
                out.print(wrap_line(f"equal    {format_point(common)}", out.width))
        if results.finalists:
            out.print(wrap_line(f"finals   {self.verdict()}", out.width))
            out.print(draw(*tables.finalist_rows(results.finalists, results.objective), out.width))
        if results.front:
            out.print(wrap_line(f"front    {self.verdict()}", out.width))
            if results.front.certified:
                out.print(draw(*tables.front_rows(results.front, results.plan.criteria.metrics), out.width))
        lines = [*self._notes(), *self._locations(recording)]
        lines += [f"stopped  {self.stopped}"] if self.stopped else []
        if self.retry_command and (is_over or self.retry_command != self.command):
            lines.append(f"retry    {self.retry_command}")
        lines += [f"certify  {self.certify_command}"] if self.certify_command else []
        if not is_over:
            lines.append(f"resume   {self.command}")
        elif is_exhausted:
            lines.append("done     every point of the space was tried")
        else:
            lines += [f"ended    by {self.ended_by}", f"extend   {self.extend_command}"]
        for line in lines:
            out.print(wrap_line(line, out.width))
        print(text.getvalue(), end="", flush=True)

    def _describe_winner(self) -> str:
        results, winner = self.results, self.results.winner
        assert winner is not None
        first, metric = results.first_finalist, get_metric(results.objective)
        value = (first.value if first else Interval.read(winner.metrics, results.objective)).scaled(metric.factor)
        interval = f" (95% {format_interval(value.low, value.high)})" if value.has_interval else ""
        tied = ", ".join(str(finalist.trial.number) for finalist in results.finalists[1:] if finalist.tied)
        point = format_point({name: winner.params[name] for name in tables.varying_parameters(results.records)})
        number = f"trial {winner.number}{f', tied with {tied},' if tied else ''}"
        return f"{number} with {format_number(value.value)} {metric.unit or metric.name}{interval} at {point}"

    @cached_property
    def _unranked(self) -> list[TrialRecord]:
        objective = self.results.objective
        return [r for r in self.results.records if r.status is TrialStatus.COMPLETE and objective not in r.metrics]

    def _notes(self) -> list[str]:
        results, lines = self.results, list[str]()
        finals = [r for r in results.remeasured if r.remeasurement and r.remeasurement.group]
        if failed := [r for r in finals if r.status not in (TrialStatus.COMPLETE, TrialStatus.CANCELLED)]:
            last = failed[-1]
            example = f"example: trial {last.number}{last.remeasurement}, {last.status.value}: {last.reason}"
            lines.append(f"finals   {len(failed)} of {count(len(finals), 'trial')} did not complete; {example}")
        if finals and finals[0].number < max(record.number for record in results.records):  # of an extended sweep
            rounds = f"{count(len(finals), 'trial')} are rounds of finals"
            lines.append(f"numbers  {rounds} and do not count toward the budget")
        for trial in results.lost_finalists:
            place = "the best of the search, " if trial is results.best[0] else ""
            lines.append(f"finals   trial {trial.number}, {place}has no result: its rounds did not complete")
        if quality := results.prediction_quality():
            error = quality["predicted_error"]
            distance = f"{error:.1%} off" if error < 1 else f"{1 + error:.0f} times the measured values"
            order = f"; rank correlation {quality['predicted_order']:.2f}" if "predicted_order" in quality else ""
            lines.append(f"model    estimates are {distance} (median of the trials){order}")
        if results.correction:
            lines.append(f"         {results.correction.describe()}; kept for later plans in {corrections.FILE}")
        if results.gpus:
            lines.append(f"GPUs     {per_gpu.describe(results.gpus)}")
        lines += [f"drained  {node}" for node in self.drained]
        if unmet := results.plan.criteria.describe_unmet(results.records):
            lines.append(f"limits   {unmet}")
        elif exceeded := results.exceeded:
            limits = " or ".join(dict.fromkeys(f"limits.{limit}" for each in exceeded.values() for limit in each))
            numbers = ", ".join(map(str, list(exceeded)[:SHOWN_ROWS])) + ", …" * (len(exceeded) > SHOWN_ROWS)
            lines.append(f"limits   {count(len(exceeded), 'trial')} without a rank, beyond {limits}: {numbers}")
        lines += _describe_kinds("not ranked by speed", self._unranked)
        steps = sorted({record.metrics.get("steps", 0.0) for record in results.best})
        is_of_last_step = results.plan.resolved.workload.runs_command and choose_summary(results.objective) == "last"
        if len(steps) > 1 and is_of_last_step:
            text = f"trials have {steps[0]:g} to {steps[-1]:g} timed steps"
            lines.append(f"note     {results.objective} of unequal training is ranked: {text}")
        lines += _describe_kinds("infeasible", [r for r in results.records if r.status is TrialStatus.INFEASIBLE])
        if results.is_inconclusive:
            lines.append("busy     over a fifth of the trials are inconclusive: retry when the machine is idle")
        for status in WITHOUT_RESULT:
            kinds = _group_by_reason([record for record in results.records if record.status is status])
            if len(kinds) > SHOWN_REASONS:
                lines.append(f"{status.value} for {len(kinds)} reasons, the most frequent ones below: see trials.csv")
            for records in kinds[:SHOWN_REASONS]:
                last = records[-1]
                lines.append(f"{len(records)} {status.value}; example: trial {last.number}: {last.reason}")
                if (path := results.plan.folder / "files" / f"{last.number:04d}" / "last_lines.txt").exists():
                    lines.append(f"         its last lines: {relative_path(path)}")
                elif last.where.get("log"):
                    lines.append(f"         log {last.where['node']}:{last.where['log']}")
        if number := len(results.earlier_attempts):
            kept = "the earlier attempts are kept in trials.csv and in MLflow"
            lines.append(f"retried  {count(number, 'trial')}; {kept}")
        return lines

    def _locations(self, recording: Recording) -> list[str]:
        folder, directory = self.results.plan.folder, self.results.plan.directory
        lines = [f"winner   {self._describe_winner()}"] if self.results.winner and not self.results.front else []
        lines.append(f"results  {relative_path(folder / 'trials.csv')}")
        if (plots := folder / PLOTS).exists():
            lines.append(f"plots    {relative_path(plots)}")
        if (best := folder / "best").exists():
            lines.append(f"again    {best_command(folder)}")
            lines.append(f"files    {relative_path(best)}")
        if recording.refused:
            number, reason = next(iter(recording.refused.items()))
            refused = f"MLflow   refuses the values of {count(len(recording.refused), 'trial')} permanently"
            lines.append(f"{refused}, such as trial {number}: {reason}; they are in trials.csv")
        if not recording.is_complete:
            trials = len(self.results.records) + len(self.results.remeasured)
            reason = recording.error or "it has not answered yet"
            kept = "they are kept, and the same command writes them"
            return [*lines, f"MLflow   {recording.pending} of {trials} results are not written ({reason}); {kept}"]
        uri, page = recording.uri, recording.runs_page
        if uri and uri.startswith("http"):
            return [*lines, f"review   {mask(uri).rstrip('/')}{page}"]
        change_directory = "" if directory == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
        store = f" --backend-store-uri {shlex.quote(mask(uri))}" if uri else ""
        python = sys.executable if change_directory else relative_path(Path(sys.executable))
        mlflow = "mlflow" if shutil.which("mlflow") else f"{python} -m mlflow"
        command = f"review   {change_directory}{mlflow} ui{store}"
        return [*lines, command, f"         http://127.0.0.1:5000{page}"]


def _group_by_reason(records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    return sorted(group_values((record.kind_of_reason, record) for record in records).values(), key=len, reverse=True)


def _describe_kinds(heading: str, records: Sequence[TrialRecord]) -> list[str]:
    lines, kinds = [], _group_by_reason(records)
    for alike in kinds[:SHOWN_ROWS]:
        example = "; example" if len({record.reason for record in alike}) > 1 else ""
        lines.append(f"{len(alike)} {heading}{example}: {alike[-1].reason}")
    if len(kinds) > SHOWN_ROWS:
        lines.append(f"{heading} for {len(kinds) - SHOWN_ROWS} more reasons: see trials.csv")
    return lines


def relative_path(path: Path) -> str:
    """Make a path below the working directory relative, and return any other path unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
