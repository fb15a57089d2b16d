"""Run a sweep or show its plan from a configuration composed by Hydra: `python -m sweeper key=value …`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from sweeper.cli.arguments import Arguments, parse_arguments
from sweeper.cli.command import SUBCOMMANDS
from sweeper.cli.composition import ComposedSweep, compose_sweeps
from sweeper.cli.exits import COMPLETE, SOME_FAILED, fail
from sweeper.cli.explanation import UnknownKey
from sweeper.cli.help_page import describe_versions, render_help
from sweeper.cli.multirun import SweepQueue, run_queues
from sweeper.commands.sweep.free_cores import plan_on_free_cores
from sweeper.common.format import short_value
from sweeper.common.grouping import group_values
from sweeper.config.hardware import Node
from workloads.api.cores import CoreWatch
from workloads.api.errors import UserInputError, describe_os_error

REMEDIES_S = 5.0  # how long to search for the keys at fault
SHOWN_FAULTS = 5


def run(words: list[str], program: list[str]) -> int:
    """Execute the command line and return the exit code. For several sweeps, return the highest exit code."""
    arguments = parse_arguments(words)
    if "version" in arguments.flags:
        print(describe_versions())
        return COMPLETE
    if "help" in arguments.flags:
        print(render_help(arguments))
        return COMPLETE
    try:
        sweeps = compose_sweeps(arguments)
    except UnknownKey as error:  # the key may belong to a subcommand
        modules = [import_module(f"sweeper.commands.{name}.main") for name in SUBCOMMANDS]
        commands = [module.COMMAND for module in modules if hasattr(module, "COMMAND")]  # `function` takes sweep keys
        if owner := next(filter(None, (command.owner(error.key) for command in commands)), ""):
            raise UserInputError(f"{error} `{owner}` has it.") from error
        raise
    if len(sweeps) < 2:
        return run_sweep(sweeps[0], [*program, *words]) if sweeps else COMPLETE
    for sweep in sweeps:  # check all sweeps before any of them starts
        sweep.resolve()
    # Each sweep runs in its own process. On a cluster, each kind of hardware has its own queue.
    on_cluster = all(sweep.config.cluster.address and not sweep.config.plan for sweep in sweeps)
    lines = group_values((str(s.config.hardware.name) if on_cluster else "", s.command_line) for s in sweeps)
    return run_queues([SweepQueue(kind if len(lines) > 1 else "", queue) for kind, queue in lines.items()])


def find_remedies(arguments: Arguments, typed: Sequence[str], nodes: Sequence[Node]) -> Iterator[str]:
    """Yield each parameter that is alone at fault for a space without points, with its values at valid points, fastest
    first: parameters that the command sets, if it does not set them, and the state, if it is bf16."""
    from sweeper.preflight.sweep_plan import plan_sweep

    bf16 = "space.state=bf16"  # takes less memory than the fp32 state of the presets
    ends_s = time.monotonic() + REMEDIES_S
    for text in (*typed, *([] if any(other.startswith("space.state=") for other in typed) else [bf16])):
        if time.monotonic() > ends_s:
            return
        overrides = [other for other in arguments.overrides if other != text] + [bf16] * (text == bf16)
        name = text.partition("=")[0].removeprefix("space.")
        with suppress(UserInputError):
            plan = plan_sweep(compose_sweeps(Arguments(arguments.flags, tuple(overrides)))[0].resolve(), nodes)
            usual = {**vars(plan.resolved.workload.Parameters), **plan.space.constants}
            values = dict.fromkeys(short_value({**usual, **point}.get(name)) for point in plan.space.points())
            yield f"space.{name}={','.join(values)}"


def find_faults(arguments: Arguments, typed: Sequence[str], nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line for each parameter of the command that leaves no valid point, even if it is the only one."""
    from sweeper.preflight.cost_model import NoValidPoint
    from sweeper.preflight.sweep_plan import plan_sweep

    for text in typed[:SHOWN_FAULTS]:
        overrides = tuple(other for other in arguments.overrides if other == text or other not in typed)
        try:
            plan_sweep(compose_sweeps(Arguments(arguments.flags, overrides))[0].resolve(), nodes)
        except UserInputError as error:
            if isinstance(error, NoValidPoint):  # others need another parameter of the command
                yield f"{text}: {error}"


def run_sweep(sweep: ComposedSweep, command: list[str]) -> int:
    """Run a sweep in this process, or show the plan, and return the exit code. `command` resumes the sweep."""
    try:
        watch = CoreWatch()
        resolved = sweep.resolve()
        config = resolved.config
        from sweeper.execution import ray_environment

        ray_environment.prepare(config.cluster.address, config.cluster.insecure)
        # Ray and Optuna take a second to import, so --help and invalid input must not import them.
        from sweeper.config.device_values import default_names
        from sweeper.execution.cluster import discover_nodes
        from sweeper.execution.shipping import SweepCode
        from sweeper.preflight.cost_model import NoValidPoint
        from sweeper.preflight.sweep_plan import check_retry, plan_sweep
        from sweeper.results.stored import read_warm_start
        from sweeper.tracking.mlflow_store import check_default_store, check_uri

        with sweep.located():
            if config.tracking.uri:
                check_uri(config.tracking.uri)
            elif not config.plan:
                check_default_store(Path(config.dir))
            cluster, variables = config.cluster, default_names(config.hardware)
            nodes = discover_nodes(cluster.address, cluster.insecure, variables, SweepCode.of_sweep(resolved))
            typed_points = any(argument.startswith("search.initial_points=") for argument in command)
            warm_start = read_warm_start(config)
            make_plan = partial(plan_sweep, resolved, strict_initial_points=typed_points, warm_start=warm_start)
            try:
                plan = plan_on_free_cores(make_plan, nodes, config.cluster.cpus, watch)
            except NoValidPoint as error:
                typed = [text for text in sweep.arguments.overrides if text.startswith("space.")]
                remedies = " or ".join(find_remedies(sweep.arguments, typed, nodes))
                hint = f". Points are valid with {remedies}" if remedies else ""
                faults = [] if remedies else list(find_faults(sweep.arguments, typed, nodes))
                if len(faults) > 1:
                    raise UserInputError("\n".join(faults)) from error
                raise UserInputError(f"{' '.join(typed) or 'space'}: {error}{hint}") from error
            check_retry(plan)
        if config.plan:
            from sweeper.pages.plan_view import show_plan

            return COMPLETE if show_plan(plan) else SOME_FAILED
        from sweeper.commands.sweep.loop import Sweep  # imports modules that a plan does not need

        # Drop progress=json from the command that resumes the sweep: notebooks set this key, but people want text.
        return Sweep(plan, [word for word in command if word != "progress=json"]).run()
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full or unavailable
        return fail(f"dir={sweep.config.dir}: {describe_os_error(error)}; nothing was started", SOME_FAILED)
