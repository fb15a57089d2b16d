"""Sweeps that share MLflow's server, with its authentication and PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROBE, Workspace
from tests.support.shared_store import SharedStore, missing_reason
from tests.support.store_load import LocalRay, SharedSweeps, restart_by

SWEEPS, TRIALS = 8, 40


@pytest.fixture(scope="module")
def store() -> Iterator[SharedStore]:
    if reason := missing_reason():
        pytest.skip(reason)
    with SharedStore() as store:
        yield store


def list_command_lines() -> list[bytes]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes())
        except OSError:
            continue
    return lines


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_eight_sweeps_share_a_server_that_is_stopped_and_killed(store: SharedStore, tmp_path: Path) -> None:
    seen: list[bytes] = []
    with LocalRay(tmp_path, SWEEPS) as ray:
        sweeps = SharedSweeps(tmp_path, ray, store, SWEEPS, TRIALS, sleep_s=0.5, user="alice")
        outcome = sweeps.run({0.1: lambda: seen.extend(list_command_lines()), **restart_by(store)}, limit_s=2400)
    assert outcome.trials == SWEEPS * TRIALS, outcome
    assert (outcome.lost, outcome.doubled, outcome.wrong, outcome.repeated) == (0, 0, 0, 0), outcome
    assert (outcome.running, outcome.deadlocks) == (0, 0), outcome

    lines = sweeps.report("markdown").splitlines()
    for name in (path.name for path in sweeps.folders):
        assert [line for line in lines if f"| {name} |" in line and f"| {TRIALS} complete |" in line], lines

    assert any(b"sweeper.tracking.process" in line for line in seen)
    for name, password in store.passwords.items():
        assert not [line for line in seen if password.encode() in line], name
        assert not store.files_with(password, [tmp_path, store.folder]), name


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_wrong_password_is_refused_before_anything_starts(store: SharedStore, workspace: Workspace) -> None:
    variables = store.add_user("bob") | {"MLFLOW_TRACKING_PASSWORD": "not-the-one-of-bob"}
    result = workspace.run(*PROBE, f"tracking.uri={store.uri}", **variables)
    assert result.code == 2 and "the server refuses user bob with this password" in result.err, result.err
    assert "not-the-one" not in result.err and not (workspace.path / "sweeps").exists()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_user_who_may_only_read_is_told_so_and_the_results_are_kept(store: SharedStore, workspace: Workspace) -> None:
    """The one whose sweep is the first of an experiment owns it; the server lets others read it."""
    sweep = [*PROBE, "budget.trials=2", "search=random", f"tracking.uri={store.uri}"]
    owner = workspace.run(*sweep, "tracking.experiment=of_dave", "name=dave", **store.add_user("dave"))
    assert owner.code == 0, owner.err
    variables = store.add_user("carol")
    result = workspace.run(*sweep, "tracking.experiment=of_dave", "name=carol", **variables)
    assert result.code == 1 and "Permission denied" in result.out, result.out + result.err
    again = workspace.run(*sweep, "tracking.experiment=of_carol", "name=carol", **variables)
    assert again.code == 0, again.err
