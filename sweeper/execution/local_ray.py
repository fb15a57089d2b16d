"""Ray on this machine without the processes that a sweep does not use.

`ray.init` also starts an autoscaler, a monitor that copies workers' logs to the driver, and the dashboard's server,
which without a dashboard has no pages. There is no option against them. Measured on two idle cores: `ray.init` takes
2.4 s instead of 3.4 s, `ray.shutdown` 0.2 s instead of 1.2 s.

The raylet starts the dashboard's agent too, a Python program, and waits for its ports; after 15 s without them it ends,
and with it the sweep. Without `ray[default]` the agent imports Ray to report that it has none (ray/dashboard/agent.py).
Two trials of nothing take 10.3 to 12.9 s of CPU time without it, 12.6 to 14.8 s with it, on two cores that were busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sweeper.execution.ray_internals import NO_AGENT, RAY_NODE, START_PROCESS, UNUSED


def _start_nothing(*_: Any, **__: Any) -> None:
    pass


def _without_agent(start_process: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's function that starts a process, with `NO_AGENT` for the raylet; the last of equal options counts."""

    def start(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        options = NO_AGENT if process_type == "raylet" else ()
        return start_process([*command, *options], process_type, *args, **kwargs)

    return start


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Let `ray.init` start a local cluster without them."""
    replaced: dict[tuple[Any, str], Any] = {(RAY_NODE, name): _start_nothing for name in UNUSED}
    replaced[START_PROCESS] = _without_agent(getattr(*START_PROCESS))
    originals = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), replacement in replaced.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
