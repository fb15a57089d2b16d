"""`python -m sweeper`: Hydra composes the configuration, and a sweep or its plan runs."""

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
from sweeper.common.exit_codes import COMPLETE, INTERRUPTED, INVALID_INPUT, SOME_FAILED
from sweeper.config import migration, resolution


def main() -> None:
    """Run the console command and exit with a code of `sweeper.common.exit_codes`."""
    program = ["sweeper"] if Path(sys.argv[0]).name == "sweeper" else [_python(), "-m", "sweeper"]
    command = [*program, *sys.argv[1:]]
    arguments = command[len(program) :]
    sys.argv = ["sweeper", *overrides.quote_spaces(arguments)]  # the name in Hydra's messages
    composed_sweeps: list[tuple[DictConfig, list[str]]] = []  # with the arguments of each

    @hydra.main(version_base="1.3", config_path=str(resolution.CONF), config_name="config")
    def collect(composed: DictConfig) -> None:
        overrides_of_sweep = HydraConfig.get().overrides.task
        composed_sweeps.append((composed, overrides.build_sweep_arguments(arguments, overrides_of_sweep)))

    # Hydra prints what is wrong with the arguments, or with this raises it.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    code = COMPLETE
    try:
        migration.check_arguments(arguments)
        collect()
        if composed_sweeps:
            code = _run_sweeps(composed_sweeps, command)
    except UserInputError as error:
        code = _fail(str(error), INVALID_INPUT)
    except (HydraException, OmegaConfBaseException) as error:
        code = _fail(overrides.explain(error, arguments), INVALID_INPUT)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        code = _fail("interrupted before anything was started", INTERRUPTED)
    sys.exit(code)


def _run_sweeps(composed_sweeps: list[tuple[DictConfig, list[str]]], command: list[str]) -> int:
    """Run one sweep in this process, several in processes of their own. Returns the highest exit code.

    On a cluster, sweeps for different hardware run in parallel.
    """
    if len(composed_sweeps) == 1:
        return _run_sweep(composed_sweeps[0][0], command)
    for composed, _ in composed_sweeps:  # all of them are checked before one starts
        resolution.resolve(composed)
    kinds = list(dict.fromkeys(str(composed.hardware.name) for composed, _ in composed_sweeps))
    on_cluster = all(composed.cluster.address and not composed.plan for composed, _ in composed_sweeps)
    if len(kinds) == 1 or not on_cluster:
        return multirun.run_queues([multirun.SweepQueue("", [arguments for _, arguments in composed_sweeps])])
    by_kind = {
        kind: [arguments for composed, arguments in composed_sweeps if composed.hardware.name == kind] for kind in kinds
    }
    return multirun.run_queues([multirun.SweepQueue(kind, sweeps) for kind, sweeps in by_kind.items()])


def _run_sweep(composed: DictConfig, command: list[str]) -> int:
    try:
        resolved = resolution.resolve(composed)
        # Ray and Optuna take a second to import: not for --help, nor for invalid input.
        from sweeper.execution import cluster
        from sweeper.planning.plan import build_plan
        from sweeper.sweep import Sweep
        from sweeper.tracking.mlflow_store import check_uri
        from sweeper.ui.plan_view import show_plan

        config = resolved.config
        if config.tracking.uri:
            check_uri(config.tracking.uri)
        nodes = cluster.discover_nodes(config.cluster.address, config.cluster.insecure)
        typed_points = any(argument.startswith("search.initial_points=") for argument in command)
        plan = build_plan(resolved, nodes, strict_initial_points=typed_points)
        if config.plan:
            show_plan(plan)
            return COMPLETE
        return Sweep(plan, command).run()
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full or gone
        return _fail(f"dir={composed.dir}: {describe_os_error(error)}; nothing was started", SOME_FAILED)


def _python() -> str:
    """Return the interpreter as a person would type it here."""
    interpreter = Path(sys.executable)
    below = interpreter.is_relative_to(Path.cwd())
    return str(interpreter.relative_to(Path.cwd())) if below else interpreter.name


def _fail(message: str, code: int) -> int:
    print(f"sweeper: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
