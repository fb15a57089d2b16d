"""Several sweeps of one command."""

import sys

import pytest
from omegaconf import OmegaConf

from sweeper.cli import multirun
from sweeper.cli.arguments import Arguments
from sweeper.cli.composition import ComposedSweep, unquote


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([0, 1], 1), ([0, -9], 1), ([], 1)])
def test_a_sweep_that_was_killed_is_not_complete(codes: list[int], worst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that end with these codes replace the sweeps."""
    popen = multirun.subprocess.Popen

    def popen_with_code(command: list[str], **options: object) -> object:
        program = f"import os, signal; c = {command[-1]}; os.kill(os.getpid(), -c) if c < 0 else os._exit(c)"
        return popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(multirun.subprocess, "Popen", popen_with_code)
    assert (
        multirun.run_queues([multirun.SweepQueue(f"queue {n}", [[str(code)]]) for n, code in enumerate(codes)]) == worst
    )


def test_each_sweep_of_a_multirun_gets_the_flags_of_the_command() -> None:
    sweep = ComposedSweep(OmegaConf.create(), Arguments({"config_dir": "mine"}, unquote(["seed=1", "++space.x=3"])))
    assert sweep.command_line == ["--config-dir=mine", "seed=1", "space.x=3"]


def test_a_signal_before_a_sweep_starts_prevents_the_start() -> None:
    queue = multirun.SweepQueue("", [["--no-such-word"]])
    queue.stop(2)
    queue.run()
    assert queue.process is None and queue.codes == []
