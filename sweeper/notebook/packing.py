"""Pack a user's function into a file for the sweep's processes, and write the function's space as overrides."""

import base64
import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from sweeper.config.space import LISTS, write_value
from workloads.api import registry
from workloads.api.errors import UserInputError

FOLDER = "functions"
RANK, REPORT = "rank", "report"  # names of parameters that do not belong to the space (see `workloads.function`)
SCALARS = (str, int, float, bool, type(None))
DIGEST_LENGTH = 12


def write_function(function: Callable[..., Any], space: Mapping[str, Any], directory: Path) -> Path:
    """Pack a function into a file in the results directory and return its path. Raises UserInputError on failure."""
    name = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "function"
    parameters = inspect.signature(function).parameters.values()
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    names = [item.name for item in named if item.name not in (RANK, REPORT)]
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        names += [key for key in space if key not in names and key != "env"]
    # Other defaults, such as lists, are left for the function itself to apply.
    defaults = {item.name: item.default for item in named if item.name in names and type(item.default) in SCALARS}
    left_out = [item.name for item in named if item.default is not item.empty and item.name not in defaults]
    workload = registry.load("function")
    assert workload.Settings is not None
    settings = workload.Settings(
        name=name,
        digest=_digest(function),
        code=_pack(function, name),
        parameters=[item for item in names if item not in left_out],
        defaults=defaults,
        takes_rank=any(item.name == RANK for item in named),
        takes_report=any(item.name == REPORT for item in named),
    )
    path = directory.expanduser().resolve() / FOLDER / f"{name}-{settings.digest}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(settings)))
        path.chmod(0o600)
    except OSError as error:
        raise UserInputError(f"dir={directory}: cannot be written ({error.strerror})") from error
    return path


def _digest(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    try:
        source = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    except (OSError, TypeError):  # the function was defined at a prompt
        code = getattr(inner, "__code__", None)
        source = f"{code.co_code.hex()} {code.co_consts}" if code else repr(inner)
    try:
        around = inspect.getclosurevars(inner)
        read = {**around.globals, **around.nonlocals}
    except TypeError:  # a callable object
        read = {}
    plain = {key: value for key, value in sorted(read.items()) if isinstance(value, SCALARS)}
    return hashlib.sha256(f"{source}{plain}".encode()).hexdigest()[:DIGEST_LENGTH]


def _pack(function: Callable[..., Any], name: str) -> str:
    """Pickle a function, by value unless its module is installed, because workers may not find the module."""
    import cloudpickle

    module = inspect.getmodule(function)
    top = sys.modules.get(module.__name__.partition(".")[0]) if module else None
    by_value = top is not None and top.__name__ != "__main__" and not _is_installed(top)
    if by_value:
        cloudpickle.register_pickle_by_value(top)
    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # any object that the function refers to may raise
        raise UserInputError(f"workload={name}: cannot be sent to workers: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(top)


def _is_installed(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    if path is None or module.__name__ in ("sweeper", "workloads"):
        return True
    return "site-packages" in path or Path(path).is_relative_to(sysconfig.get_path("stdlib"))


def space_words(space: Mapping[str, Any], prefix: str = "space.") -> list[str]:
    """Write a space as Hydra overrides. A list or tuple is a choice, a `range` is a range, and a string is parsed."""
    words = []
    for name, entry in space.items():
        if name == "env" and isinstance(entry, Mapping):
            words += space_words(entry, f"{prefix}env.")
        else:
            words.append(f"{prefix}{name}={_write_entry(f'{prefix}{name}', entry)}")
    return words


def _write_entry(key: str, entry: Any) -> str:
    if isinstance(entry, range):
        return f"range({entry.start},{entry.stop},{entry.step})"
    if isinstance(entry, (list, tuple)):
        return f"[{','.join(_write_scalar(key, value, quoted=True) for value in entry)}]"
    return _write_scalar(key, entry, quoted=False)


def _write_scalar(key: str, value: Any, *, quoted: bool) -> str:
    value = value.item() if hasattr(value, "item") else value  # a NumPy scalar
    if not isinstance(value, SCALARS):
        raise UserInputError(f"{key}={value!r}: must be a number, a text, a bool, None, a list of these or a range")
    if isinstance(value, str) and not quoted and any(mark in value for mark in LISTS):
        return value  # already in the grammar of spaces
    if isinstance(value, str) and ("\n" in value or "\0" in value):
        raise UserInputError(f"{key}={value!r}: a text must be one line")
    return write_value(value)
