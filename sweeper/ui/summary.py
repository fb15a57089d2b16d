"""What is said when a sweep ends: the best trials, what went wrong, where it all is and how to go on."""

from __future__ import annotations

import io
import shlex
import shutil
import sys
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sweeper.common import metrics
from sweeper.common.secrets import mask
from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.tracking.client import TrackingClient
from sweeper.ui import per_gpu, tables
from sweeper.ui.results import Results

SHOWN_ROWS = 10
SHOWN_FAILURES = 3  # kinds of them, of each bad ending
SHOWN_OF_ALL = 120


@dataclass(frozen=True)
class Summary:
    """`command` is what runs or resumes the sweep, `command_for_more` what extends it; `aside` are nodes that were set
    aside."""

    results: Results
    command: str
    command_for_more: str
    aside: Sequence[str] = ()

    @property
    def title(self) -> str:
        plan = self.results.plan
        return f"{plan.config.workload.name} on {plan.target.model}"

    def markdown(self) -> str:
        """For the parent run's page in MLflow."""
        best = (
            tables.markdown(self.results.best[:SHOWN_ROWS], self.results.objective)
            if self.results.best
            else "no trial was complete"
        )
        lines = [f"**{self.title}**: {tables.said_counts(self.results.counts)}", "", best, ""]
        if alike := tables.alike(self.results.best[:SHOWN_ROWS]):
            lines += [f"Alike in all: {tables.said_point(alike)}", ""]
        if self.results.final:
            lines += [
                self.verdict(),
                "",
                tables.markdown_of(*tables.final_rows(self.results.final, self.results.objective)),
                "",
            ]
        if self.results.gpus:
            lines += [per_gpu.said(self.results.gpus), ""]
        for node in self.aside:
            lines += [f"set aside: {node}", ""]
        return "\n".join([*lines, f"`{self.command}`"])

    def verdict(self) -> str:
        """Who has won the finals, or between whom it is a tie; empty where there were none."""
        if not self.results.final:
            return ""
        leader, *others = self.results.final
        if not others:
            return f"no verdict: trial {leader.trial.number} alone was measured again"
        tied = [standing.trial.number for standing in others if standing.tied]
        figure = f"{tables.said(leader.figure.value)} {metrics.unit_of(self.results.objective)}".strip()
        interval = f"95% {tables.said(leader.figure.low)} to {tables.said(leader.figure.high)}"
        how = f"mean of {leader.rounds} rounds beside the others"
        if not tied:
            return f"trial {leader.trial.number} wins: {figure} ({interval}; {how})"
        who = f"trials {', '.join(map(str, [leader.trial.number, *tied]))}"
        return f"a tie: {who} cannot be told apart; {figure} ({interval}; {how})"

    def print(self, uri: str | None, recorder: TrackingClient, written: bool, *, over: bool, exhausted: bool) -> None:
        """To standard output. `over`: the budget is used up; `exhausted`: every point of the space was tried."""
        folder = self.results.plan.folder
        # Written in one piece at the end: rich ends the process itself where a pipe is closed early.
        text = io.StringIO()
        out = Console(file=text, width=tables.shown_width(), highlight=False, soft_wrap=True, markup=False, emoji=False)
        out.print(f"\n{self.title}: {tables.said_counts(self.results.counts)}")
        if shown := self._shown(exhausted):
            out.print(tables.terminal(shown, self.results.objective, out.width))
            if alike := tables.alike(shown):
                out.print(f"alike    {tables.said_point(alike)}")
        if self.results.final:
            heading, cells = tables.final_rows(self.results.final, self.results.objective)
            out.print(f"finals   {self.verdict()}")
            out.print(tables.draw(heading, cells, len(heading) - 5, out.width))  # intervals where there is room
        for line in self._failed_finals():
            out.print(line)
        if self.results.foresight():
            out.print(f"foresaw  {self._foresight()}")
        if self.results.gpus:
            out.print(f"GPUs     {per_gpu.said(self.results.gpus)}")
        for node in self.aside:
            out.print(f"aside    {node}")
        for line in self._unranked():
            out.print(line)
        for line in self._failures():
            out.print(line)
        out.print(f"results  {near(folder / 'trials.csv')}")
        if (folder / "pictures" / "pictures.html").exists():
            out.print(f"pictures {near(folder / 'pictures' / 'pictures.html')}")
        review = self._review(folder.parent.parent, uri, recorder)
        for line in (
            review if written else [_not_written(recorder, len(self.results.records) + len(self.results.remeasurement))]
        ):
            out.print(line)
        if not over:
            out.print(f"resume   {self.command}")
        elif exhausted:
            out.print("done     every point of the space was tried")
        else:
            out.print(f"more     {self.command_for_more}")
        print(text.getvalue(), end="", flush=True)

    def _foresight(self) -> str:
        found = self.results.foresight()
        off = found["predicted_error"]  # above one it can only be too much
        how_far = f"{off:.1%} off" if off < 1 else f"{1 + off:.0f} times"
        words = f"what was predicted is {how_far} what was measured (median)"
        if "predicted_order" in found:
            words += f"; the two orders correlate by {found['predicted_order']:.2f}"
        return words

    def _shown(self, exhausted: bool) -> Sequence[TrialRecord]:
        """The best; where every point of a small space was tried, all, those last that are not ranked; where none is
        ranked, some of those."""
        everything = [*self.results.best, *self._not_ranked()]
        if exhausted and len(everything) <= SHOWN_OF_ALL:
            return everything
        return (self.results.best or everything)[:SHOWN_ROWS]

    def _not_ranked(self) -> list[TrialRecord]:
        return [
            r
            for r in self.results.records
            if r.status is TrialStatus.COMPLETE and self.results.objective not in r.metrics
        ]

    def _failed_finals(self) -> list[str]:
        """Which finalists did not come through, and why."""
        finals = [r for r in self.results.remeasurement if r.remeasurement and r.remeasurement.group]
        failed = [r for r in finals if r.status not in (TrialStatus.COMPLETE, TrialStatus.CANCELLED)]
        if not failed:
            return []
        last = failed[-1]
        assert last.remeasurement is not None
        return [
            f"finals   {len(failed)} of {len(finals)} trials did not complete, such as trial {last.number} "
            f"(again {last.remeasurement.trial}), {last.status.value}: {last.reason}"
        ]

    def _unranked(self) -> list[str]:
        """Why some that were complete have no speed to compare."""
        reasons = Counter(record.reason for record in self._not_ranked())
        return [f"{count} not ranked by speed: {reason}" for reason, count in reasons.items()]

    def _failures(self) -> list[str]:
        """Why some were infeasible, and one example of each kind of bad ending, with its log."""
        lines = []
        reasons = self._by_reason(TrialStatus.INFEASIBLE)
        for alike in reasons[:SHOWN_ROWS]:
            such = ", such as" if len({record.reason for record in alike}) > 1 else ""
            lines.append(f"{len(alike)} infeasible{such}: {alike[-1].reason}")
        if len(reasons) > SHOWN_ROWS:
            lines.append(f"infeasible for {len(reasons) - SHOWN_ROWS} more reasons: see trials.csv")
        for status in (TrialStatus.FAILED, TrialStatus.LOST, TrialStatus.TIMED_OUT):
            kinds = self._by_reason(status)
            if len(kinds) > SHOWN_FAILURES:
                lines.append(f"{status.value} for {len(kinds)} reasons, of which these were met most: see trials.csv")
            for alike in kinds[:SHOWN_FAILURES]:
                last = alike[-1]
                lines.append(f"{len(alike)} {status.value}, such as trial {last.number}: {last.reason}")
                if (words := self.results.plan.last_lines_of(last.number)).exists():
                    lines.append(f"         its last lines: {near(words)}")
                elif last.where.get("log"):
                    lines.append(f"         log {last.where['node']}:{last.where['log']}")
        return lines

    def _by_reason(self, status: TrialStatus) -> list[list[TrialRecord]]:
        """Those that ended so, the most frequent kind of reason first."""
        reasons: dict[str, list[TrialRecord]] = {}
        for record in self.results.records:
            if record.status is status:
                reasons.setdefault(record.kind_of_reason, []).append(record)
        return sorted(reasons.values(), key=len, reverse=True)

    def _review(self, directory: Path, uri: str | None, recorder: TrackingClient) -> list[str]:
        """The command that shows the runs in a browser, if one is needed, and the address of them, the best first."""
        experiment = (recorder.opened or {}).get("experiment_id")
        ascending = str(self.results.direction == "minimize").lower()
        only = urllib.parse.quote(f"tags.sweep = '{self.results.plan.name}'")
        page = f"/#/experiments/{experiment}/runs?searchFilter={only}"
        page += f"&orderByKey=metrics.%60{self.results.objective}%60&orderByAsc={ascending}"
        if uri and uri.startswith("http"):
            return [f"review   {mask(uri).rstrip('/')}{page}"]
        beside = Path(sys.executable).with_name("mlflow")
        if shutil.which("mlflow"):
            program = "mlflow"
        else:
            program = near(beside) if beside.exists() else f"{near(Path(sys.executable))} -m mlflow"
        go_there = "" if directory == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
        store = f" --backend-store-uri {shlex.quote(mask(uri))}" if uri else ""
        return [f"review   {go_there}{program} ui{store}", f"         http://127.0.0.1:5000{page}"]


def _not_written(recorder: TrackingClient, trials: int) -> str:
    why = recorder.trouble or "it has not answered yet"
    kept = "they are kept, and the same command writes them"
    return f"MLflow   {recorder.behind} of {trials} results are not in it ({why}); {kept}"


def near(path: Path) -> str:
    """A path as seen from the working directory, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
