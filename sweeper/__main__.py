"""`python -m sweeper`: Hydra composes the configuration, `sweep` runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sweeper.cli import multirun, overrides
from sweeper.common.errors import UserInputError, describe_os_error
from sweeper.config import resolution

FAILED, INVALID_INPUT = 1, 2


def main() -> None:
    """The console command. Exit codes: 0 complete, 1 some trials failed, 2 said wrongly, 130 interrupted."""
    program = ["sweeper"] if Path(sys.argv[0]).name == "sweeper" else [_python(), "-m", "sweeper"]
    said = [*program, *sys.argv[1:]]
    sys.argv = ["sweeper", *overrides.quote_spaces(sys.argv[1:])]  # as whom Hydra speaks
    codes: list[int] = []
    sweeps: list[tuple[DictConfig, list[str]]] = []  # with what each was told

    @hydra.main(version_base="1.3", config_path=str(resolution.CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        sweeps.append((composed, overrides.said_of_one(said[len(program) :], HydraConfig.get().overrides.task)))

    # Hydra prints what is wrong with the words, or with this passes it on to be said in a line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        run()
        codes += _sweeps(sweeps, said)
    except (HydraException, OmegaConfBaseException) as error:
        codes.append(_say(overrides.explain(error, sys.argv[1:]), INVALID_INPUT))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        codes.append(_say("interrupted before anything was started", multirun.INTERRUPTED))
    sys.exit(max(codes, default=0))


def _sweeps(sweeps: list[tuple[DictConfig, list[str]]], said: list[str]) -> list[int]:
    """Exit codes. On a cluster those for different hardware do not wait for one another."""
    if len(sweeps) == 1:
        return [_sweep(sweeps[0][0], said)]
    try:
        for composed, _ in sweeps:  # what is wrong with any of them is said before one starts
            resolution.read(composed)
    except UserInputError as error:
        return [_say(str(error), INVALID_INPUT)]
    kinds = list(dict.fromkeys(str(composed.hardware.name) for composed, _ in sweeps))
    if len(kinds) == 1 or not all(composed.cluster.address and not composed.plan for composed, _ in sweeps):
        return [multirun.run([multirun.SweepQueue("", [told for _, told in sweeps])])]
    of_kind = {kind: [told for composed, told in sweeps if composed.hardware.name == kind] for kind in kinds}
    return [multirun.run([multirun.SweepQueue(kind, told) for kind, told in of_kind.items()])]


def _sweep(composed: DictConfig, said: list[str]) -> int:
    try:
        checked = resolution.read(composed)
        from sweeper import sweep
        from sweeper.planning import (
            plan,
        )  # Ray and Optuna take a second to import: not for --help, nor for a wrong word

        planned = plan.plan(checked, first_is_meant=any(word.startswith("first=") for word in said))
        return plan.show(planned) if checked.plan else sweep.Sweep(planned, said).run()
    except UserInputError as error:
        return _say(str(error), INVALID_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full, or gone
        return _say(f"dir={composed.dir}: {describe_os_error(error)}; nothing was started", FAILED)


def _python() -> str:
    """The interpreter as a person would type it here."""
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else here.name


def _say(message: str, code: int) -> int:
    print(f"sweeper: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
