"""The list of sweeps: states, one that is followed from another process, one that is deleted."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sweeper.commands.list import main
from sweeper.commands.list.main import COMMAND, Follower, delete, describe_row, follow, format_amount
from sweeper.pages.terminal import draw
from sweeper.results.stored import StoredSweep, find_sweep
from sweeper.search.journal import JournalFile
from tests.conftest import Workspace, environment, wait_for
from tests.sweeper.conftest import FinishedSweep
from workloads.api.errors import UserInputError

pytestmark = [pytest.mark.long(30), pytest.mark.xdist_group("finished_sweep")]

# Another driver of the sweep: it holds the lock, and ends when its input does. Its journal grows before that.
DRIVER = """
import fcntl, os, sys
folder = sys.argv[1]
lock = open(folder + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid())); lock.flush()
print("locked", flush=True)
sys.stdin.readline()
open(folder + "/study.journal", "ab").write(open(folder + "/rest", "rb").read())
"""


@pytest.fixture
def copied(finished_sweep: FinishedSweep, tmp_path: Path) -> StoredSweep:
    shutil.copytree(finished_sweep.workspace.path / "sweeps", tmp_path / "sweeps")
    return find_sweep(tmp_path)


@contextmanager
def driver(sweep: StoredSweep) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRIVER, str(sweep.folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def command(*words: str) -> int:
    return COMMAND.run(words)


def cut_journal(sweep: StoredSweep) -> None:
    """Keep the first half of the journal, its last line cut, and write the other half beside it."""
    journal = sweep.folder / "study.journal"
    text = journal.read_bytes()
    (sweep.folder / "rest").write_bytes(text[len(text) // 2 :])
    journal.write_bytes(text[: len(text) // 2])


def test_a_row_has_the_state_the_winner_and_the_size(copied: StoredSweep) -> None:
    name, state, best, size, age = describe_row(copied)
    assert (name, state) == ("products", "finished") and "TFLOP/s, trial " in best
    assert size.endswith("iB") and age.split()[1] in dict(main.AGES_S)
    with driver(copied):
        assert describe_row(StoredSweep(copied.folder))[1] == "running"
    killed = copied.folder / "sweep.json"
    replace(copied.description, end=None).write(copied.folder)
    interrupted = StoredSweep(copied.folder)
    assert interrupted.state == "interrupted" and interrupted.winner is not None and killed.exists()
    assert interrupted.winner.rounds == 0  # the best of the search
    assert copied.description.end is not None
    replace(copied.description, end=replace(copied.description.end, failed=2)).write(copied.folder)
    assert describe_row(StoredSweep(copied.folder))[1] == "finished, 2 failed"
    end = replace(copied.description.end, is_over=False, reason="3 trials failed")
    replace(copied.description, end=end).write(copied.folder)
    assert StoredSweep(copied.folder).state == "failed"


def test_amounts_have_the_largest_unit_that_they_fill() -> None:
    texts = [format_amount(value, main.AGES_S) for value in (0.2, 59, 90, 7200, 200000)]
    assert texts == ["0.2 s", "59 s", "1.5 min", "2 h", "2.3 d"]


def test_a_narrow_terminal_keeps_the_name_and_the_state(copied: StoredSweep) -> None:
    console = Console(width=24, record=True, file=io.StringIO())
    console.print(draw(main.HEADING, [describe_row(copied)], main.MIN_COLUMNS, 24))
    text = console.export_text()
    assert "products" in text and "finished" in text and max(map(len, text.splitlines())) <= 24


def test_an_empty_folder_and_a_wrong_name(
    copied: StoredSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    assert command(f"dir={tmp_path / 'none'}") == 0 and "no sweep in" in capsys.readouterr().out
    with pytest.raises(UserInputError, match=r"^produts: unknown sweep.*Did you mean products\?"):
        command("delete", "produts", f"dir={tmp_path}")
    assert command(f"dir={tmp_path}") == 0 and copied.name in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_a_folder_that_cannot_be_read_is_named(copied: StoredSweep, tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom sweeper.results.stored import find_sweeps\n"
    code += "print([sweep.name for sweep in find_sweeps(pathlib.Path(sys.argv[1]))])"
    rights = "-dac_override,-dac_read_search"  # with them, root reads everything
    words = [] if os.geteuid() else ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    command = [*words, sys.executable, "-c", code, str(tmp_path)]
    private = copied.folder.with_name("private")
    shutil.copytree(copied.folder, private)
    (private / "sweep.json").chmod(0)
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (
        result.stdout == f"['{copied.name}']\n" and result.stderr == "sweeper: not readable, of other users: private\n"
    )
    copied.folder.parent.chmod(0)
    error = subprocess.run(command, capture_output=True, text=True, env=environment()).stderr.splitlines()[-1]
    copied.folder.parent.chmod(0o755)
    assert error.endswith(f"UserInputError: dir={tmp_path}: Permission denied ({copied.folder.parent})")


def test_the_journal_is_followed_while_it_grows(copied: StoredSweep) -> None:
    cut_journal(copied)
    follower = Follower(copied, copied.description)
    before = follower.state()
    assert 0 < before.ended < 8 + 15 and before.running >= 1
    with (copied.folder / "study.journal").open("ab") as journal:
        journal.write((copied.folder / "rest").read_bytes())
    assert follower.poll()
    after = follower.state()
    assert after.ended == 8 and after.running == 0 and after.finals == (15, 15)
    assert after.best is not None and not follower.poll()


def test_a_followed_sweep_has_no_more_trials_than_points(copied: StoredSweep) -> None:
    config = copied.description.config
    large = replace(copied.description, config={**config, "budget": {**config["budget"], "trials": 100}})
    assert Follower(copied, large).state().trials == 8


def test_following_ends_with_the_driver(copied: StoredSweep, capfd: pytest.CaptureFixture[str]) -> None:
    cut_journal(copied)
    with driver(copied) as process:
        assert process.stdin is not None
        threading.Timer(0.3, process.stdin.close).start()
        threading.Timer(0.5, process.wait).start()  # which the shell of a real driver does
        assert follow(copied) == 0
    err = capfd.readouterr().err
    assert "Ctrl-C detaches" in err and "finals: 15/15" in err and "products: finished" in err
    with pytest.raises(UserInputError, match="products: it does not run now"):
        follow(copied)


def test_ctrl_c_detaches_and_leaves_the_sweep_running(copied: StoredSweep, capfd: pytest.CaptureFixture[str]) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with driver(copied) as process:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert follow(copied) == 0
        assert process.poll() is None and copied.is_running
    signal.signal(signal.SIGINT, previous)
    assert "detached; products continues" in capfd.readouterr().err


def test_a_running_sweep_is_not_deleted_nor_one_without_asking(copied: StoredSweep, tmp_path: Path) -> None:
    words = ("delete", "products", f"dir={tmp_path}")
    with driver(copied) as process:
        with pytest.raises(UserInputError, match=f"process {process.pid} is running it"):
            command(*words, "--yes")
        with pytest.raises(UserInputError, match="is running it"):
            delete(copied)
    with pytest.raises(UserInputError, match=r"delete products \(23 trials, .*set --yes"):  # no terminal to ask on
        command(*words)
    assert copied.folder.exists()


def test_deleting_removes_the_folder_and_the_runs(copied: StoredSweep, finished_sweep: FinishedSweep) -> None:
    workspace = Workspace(copied.folder.parent.parent)
    wait_for(lambda: not StoredSweep(finished_sweep.workspace.sweeps[0]).is_running)  # its report is written
    shutil.copy(finished_sweep.workspace.path / "mlflow.db", workspace.path)
    uri = f"sqlite:///{workspace.path}/mlflow.db"
    assert len(workspace.runs("trial")) == 8 + 15
    lines = delete(copied, uri)
    assert "24 runs" in lines[0] and lines[1] == "products is deleted"
    assert not copied.folder.exists() and not workspace.runs("trial") and not workspace.runs("sweep")
    assert len(finished_sweep.workspace.runs("trial")) == 8 + 15


def test_a_damaged_sweep_hides_no_others(copied: StoredSweep, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copied.folder.parent / "damaged"
    shutil.copytree(copied.folder, damaged)
    (damaged / "sweep.json").write_text("")
    assert command(f"dir={copied.folder.parents[1]}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("damaged" in line and "the sweep's command writes it again" in line for line in lines)
    assert any(copied.name in line and "TFLOP/s" in line for line in lines)


def test_a_damaged_line_of_a_journal_is_named(copied: StoredSweep) -> None:
    journal = copied.folder / "study.journal"
    journal.write_bytes(journal.read_bytes().replace(b"\n", b"\njunk\n", 1))
    with pytest.raises(UserInputError, match=r"study.journal: is damaged: b'junk' is not a journal entry"):
        _ = StoredSweep(copied.folder).records
    with pytest.raises(UserInputError, match=r"study.journal: is damaged: .* give this sweep another name="):
        JournalFile(journal)


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no such directory"):
        command(f"dir={tmp_path / 'absent'}")
