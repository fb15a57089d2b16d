"""One finished sweep that the tests of several modules read. They are of the xdist group finished_sweep."""

from dataclasses import dataclass

import pytest

from tests.conftest import CommandResult, Workspace


@dataclass
class FinishedSweep:
    """A sweep that ended, and which several tests read."""

    workspace: Workspace
    result: CommandResult


SHAPES = ("space.m=range(64,513,64)", "space.n=256", "hardware=cpu", "progress=json", "name=products")


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> FinishedSweep:
    """From a directory without a store, in which MLflow makes its tables, and with a folder called workloads."""
    for _ in range(3):
        workspace = Workspace(tmp_path_factory.mktemp("products"))
        folder = workspace.path / "workloads"
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
        sweep = FinishedSweep(workspace, workspace.run(*SHAPES, "budget.trials=8"))
        # On a busy machine a trial may stall and be measured again; the tests count the trials of an undisturbed sweep.
        if len(workspace.trials()) == 8 + 3 * 5:
            break
    return sweep
