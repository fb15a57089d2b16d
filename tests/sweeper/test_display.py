"""What a sweep prints to a terminal and to a pipe."""

import os
import pty
import subprocess

import pytest

from tests.conftest import Workspace, environment


def run_in_terminal(workspace: Workspace, *overrides: str, columns: int, **more: str) -> str:
    """Run a sweep in a terminal of this width; return all that it was sent."""
    leader, follower = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS=str(columns), LINES="24", **more)
    process = subprocess.Popen(
        workspace.command(*overrides),
        cwd=workspace.path,
        env=env,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            if not (part := os.read(leader, 65536)):
                break
        except OSError:
            break
        seen += part
    assert process.wait(timeout=60) == 0
    return seen.decode()


@pytest.mark.soak
def test_a_terminal_shows_one_block_that_is_redrawn(workspace: Workspace) -> None:
    shown = run_in_terminal(workspace, "workload=probe", "budget.trials=6", "space.sleep_s=0.3", columns=60)
    assert "\x1b[1A" in shown or "\x1b[2K" in shown  # moves up and clears: redrawn in place
    assert "6 complete" in shown and "worker 1" in shown and "left" in shown
    assert "\x1b[32m" in shown
    plain = run_in_terminal(workspace, "workload=probe", "budget.trials=6", "seed=5", columns=60, NO_COLOR="1")
    assert "\x1b[32m" not in plain and "6 complete" in plain


@pytest.mark.soak
def test_without_a_terminal_progress_is_plain_lines_on_stderr_and_results_on_stdout(workspace: Workspace) -> None:
    result = workspace.run("workload=probe", "budget.trials=5")
    assert "\x1b" not in result.err + result.out
    assert "5/5 trials: 5 complete" in result.err
    assert "trial" in result.out and "new best" not in result.out
    quiet = workspace.run("workload=probe", "budget.trials=5", "seed=2", "progress=never")
    assert "trials:" not in quiet.err and "5 complete" in quiet.out
