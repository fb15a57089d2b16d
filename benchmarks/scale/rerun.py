"""A finished sweep of many trials, run again: the whole command with its recording process.

The sweep is made from a real one of `SAMPLE` trials: the lines of its journal and its runs in MLflow are repeated under
further numbers. Its first run closes it, with all plots and the report; the second has nothing left to write.
"""

import ctypes
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sweeper.search.journal import CREATE_TRIAL, SET_ATTR, SET_STATE

SAMPLE = 500
PR_SET_CHILD_SUBREAPER = 36  # prctl(2): the recording process may end after the driver, and is waited for too
SWEEP = ["workload=probe", "search=random", "name=large", "finals.top=0", "hardware=cpu", "progress=never"]
SWEEP += ["space.x=interval(-10,10)", "space.y=interval(-10,10)"]


def measure_rerun(trials: int, folder: Path) -> dict[str, Any]:
    """Return the cost of the run that closes a sweep of so many trials, and of running it again."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    run_sweep(folder, SAMPLE)
    (journal,) = folder.glob("sweeps/*/study.journal")
    repeat_journal(journal, trials)
    repeat_runs(folder / "mlflow.db", trials)
    runs = {name: run_sweep(folder, trials) for name in ("close", "rerun")}
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        query = "SELECT status FROM runs JOIN tags USING (run_uuid) WHERE key = 'sweeper.kind' AND value = 'sweep'"
        ((status,),) = database.execute(query).fetchall()
    return {"trials": trials, **runs, "parent": status, "journal_mb": journal.stat().st_size / 1e6}


def run_sweep(folder: Path, trials: int) -> dict[str, Any]:
    """Run the sweep and wait for every process of it. Returns seconds, the memory of the largest and what it says."""
    command = [sys.executable, "-m", "sweeper", *SWEEP, f"dir={folder}", f"budget.trials={trials}"]
    load, started_s = os.getloadavg()[0], time.monotonic()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        driver = subprocess.Popen(command, stdout=out, stderr=err)
    cpu_s, memory_mib, code, wall_s = 0.0, 0.0, -1, 0.0
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        cpu_s += usage.ru_utime + usage.ru_stime  # of the process and of those that it waited for
        memory_mib = max(memory_mib, usage.ru_maxrss / 1024)
        if pid == driver.pid:
            wall_s, code = time.monotonic() - started_s, os.waitstatus_to_exitcode(status)
    if code:
        sys.exit((folder / "err").read_text()[-4000:])
    load = (load + os.getloadavg()[0]) / 2
    says_finished = "finished before" in (folder / "err").read_text()
    return {"cpu_s": cpu_s, "wall_s": wall_s, "load": load, "memory_mib": memory_mib, "says_finished": says_finished}


def repeat_journal(journal: Path, trials: int) -> None:
    """Repeat the trials of a journal under further numbers, each time with slightly other parameters."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    creating = [line for line in lines if line["op_code"] == CREATE_TRIAL]
    ending: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["op_code"] in (SET_ATTR, SET_STATE):
            ending[line["trial_id"]].append(line)
    with journal.open("w") as file:
        for line in lines:
            if line["op_code"] not in (CREATE_TRIAL, SET_ATTR, SET_STATE):
                _write(file, line)
        for number in range(trials):
            repetition, sample = divmod(number, len(creating))
            params = creating[sample]["params"]
            params = params | {"x": params["x"] * (1 - 1e-7 * repetition)}
            _write(file, creating[sample] | {"params": params})
            for line in ending[sample]:
                _write(file, _renumber(line, number, params) | {"trial_id": number})


def _renumber(line: Mapping[str, Any], number: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line whose record, if it has one, is that of another trial."""
    record = line.get("user_attr", {}).get("record")
    if record is None:
        return dict(line)
    return dict(line) | {"user_attr": {"record": record | {"number": number, "params": params}}}


def _write(file: Any, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")


def repeat_runs(path: Path, trials: int) -> None:
    """Repeat the runs of the trials in MLflow's tables, and mark all as written, as the end of such a sweep does."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TEMP TABLE child AS SELECT run_uuid, CAST(value AS INTEGER) AS number FROM tags "
            "WHERE key = 'sweeper.trial'"
        )
        (sample,) = database.execute("SELECT count(*) FROM child").fetchone()
        for table in ("runs", "params", "tags", "metrics", "latest_metrics"):
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(_value_of(table, column) for column in columns)
            # The best trials alone have a place.
            others = "" if table in ("runs", "params") else "WHERE original.key NOT IN ('place', 'interval')"
            for repetition in range(1, trials // sample):
                database.execute(
                    f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} AS original "
                    f"JOIN child ON child.run_uuid = original.run_uuid {others}",
                    {"suffix": f"{repetition:06d}", "offset": repetition * sample},
                )
        database.execute("UPDATE tags SET value = ? WHERE key = 'sweeper.written'", [str(trials)])


def _value_of(table: str, column: str) -> str:
    """Return the SQL expression of a column in the repeated rows."""
    if column == "run_uuid":
        return "substr(original.run_uuid, 1, 26) || :suffix"
    if (table, column) == ("tags", "value"):
        number = "CAST(child.number + :offset AS TEXT)"
        return f"CASE original.key WHEN 'sweeper.trial' THEN {number} ELSE original.value END"
    return f"original.{column}"
