"""`python -m sweeper key=value …`: Hydra composes the configuration, and a sweep or its plan runs."""

from __future__ import annotations

from pathlib import Path

from sweeper.cli import multirun
from sweeper.cli.arguments import parse_arguments
from sweeper.cli.composition import ComposedSweep, compose_sweeps
from sweeper.cli.exits import fail
from sweeper.cli.help_page import render_help
from sweeper.cli.versions import describe_versions
from sweeper.common.exit_codes import COMPLETE, SOME_FAILED
from sweeper.config import migration
from workloads.api.errors import describe_os_error


def run(words: list[str], program: list[str]) -> int:
    """Do what the words of the command line say. Returns the exit code."""
    migration.check_arguments(words)
    arguments = parse_arguments(words)
    if "version" in arguments.flags:
        print(describe_versions())
        return COMPLETE
    if "help" in arguments.flags:
        print(render_help(arguments))
        return COMPLETE
    sweeps = compose_sweeps(arguments)
    return _run_sweeps(sweeps, [*program, *words]) if sweeps else COMPLETE


def _run_sweeps(sweeps: list[ComposedSweep], command: list[str]) -> int:
    """Run one sweep in this process, several in processes of their own. Returns the highest exit code.

    On a cluster, sweeps for different hardware run in parallel.
    """
    if len(sweeps) == 1:
        return run_sweep(sweeps[0], command)
    for sweep in sweeps:  # all of them are checked before one starts
        sweep.resolve()
    kinds = list(dict.fromkeys(str(sweep.config.hardware.name) for sweep in sweeps))
    on_cluster = all(sweep.config.cluster.address and not sweep.config.plan for sweep in sweeps)
    if len(kinds) == 1 or not on_cluster:
        return multirun.run_queues([multirun.SweepQueue("", [sweep.command_line for sweep in sweeps])])
    by_kind = {kind: [sweep.command_line for sweep in sweeps if sweep.config.hardware.name == kind] for kind in kinds}
    return multirun.run_queues([multirun.SweepQueue(kind, lines) for kind, lines in by_kind.items()])


def run_sweep(sweep: ComposedSweep, command: list[str]) -> int:
    """Run one sweep in this process, or show its plan. `command` resumes it. Returns the exit code."""
    try:
        resolved = sweep.resolve()
        from sweeper.execution import ray_environment

        ray_environment.prepare(resolved.config.cluster.address, resolved.config.cluster.insecure)
        from sweeper.config.environment_defaults import default_names

        # Ray and Optuna take a second to import: not for --help, nor for invalid input.
        from sweeper.execution import cluster
        from sweeper.execution.shipping import SweepCode
        from sweeper.pages.plan_view import show_plan
        from sweeper.preflight.sweep_plan import plan_sweep
        from sweeper.results.warm_start import read_warm_start
        from sweeper.tracking.mlflow_store import check_default_store, check_uri

        config = resolved.config
        with sweep.located():
            if config.tracking.uri:
                check_uri(config.tracking.uri)
            elif not config.plan:
                check_default_store(Path(config.dir))
            variables = default_names(config.hardware)
            code = SweepCode.of_sweep(resolved)
            nodes = cluster.discover_nodes(config.cluster.address, config.cluster.insecure, variables, code)
            typed_points = any(argument.startswith("search.initial_points=") for argument in command)
            plan = plan_sweep(resolved, nodes, strict_initial_points=typed_points, warm_start=read_warm_start(config))
        if config.plan:
            show_plan(plan)
            return COMPLETE
        from sweeper.commands.sweep.loop import (
            Sweep,  # and with it the tables, plots and MLflow's views of results: not for a plan
        )

        return Sweep(plan, command).run()
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full or gone
        return fail(f"dir={sweep.config.dir}: {describe_os_error(error)}; nothing was started", SOME_FAILED)
