"""What a test leaves behind in its process, where later tests of another order would find it."""

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

# Set once in a process, to the same values by whatever test comes first: by pytest, Ray, MLflow, Hydra, the
# directories of compiled kernels, torch's compiler, and on a GPU FlashAttention 4's and Triton's imports.
PROCESS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "RAY_CLIENT_MODE",
    "_MLFLOW_TELEMETRY_SESSION_ID",
    "HYDRA_FULL_ERROR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_SKIP_MDS_QUERY",
    "TRITON_PTXAS_PATH",
}
# What torch.compile has made for a graph. The name is a digest of the source, so every test finds the same module.
COMPILED = re.compile(r"torch\._inductor\.runtime\.compile_tasks\.c[a-z2-7]{51}|c[a-z2-7]{51}\.kernel")
# What Triton compiles, in its cache: each new kind of launcher takes the name of the one before. And the folder that
# FlashAttention 4's compiler adds.
TRITON_MODULES = {"cuda_utils", "__triton_launcher", "hip_utils"}
CUTLASS_FOLDER = "cutlass/base_dsl"


def _read_loaded(name: str, read: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a function that reads something of a module; it returns None while the module is not imported."""

    def read_if_loaded() -> Any:
        module = sys.modules.get(name)
        return None if module is None else read(module)

    return read_if_loaded


def _read_torch(torch: Any) -> Any:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _read_handler(signum: signal.Signals) -> object:
    """Return the handler of a signal. Ray's counts as none: it stays where a test has started a node."""
    handler = signal.getsignal(signum)
    return signal.SIG_DFL if getattr(handler, "__module__", "").startswith("ray.") else handler


# What takes microseconds to read, by its name in a message.
READ_STATE: dict[str, Callable[[], Any]] = {
    "the working directory": os.getcwd,
    "handlers of the root logger": lambda: list(logging.getLogger().handlers),
    "the level of the root logger": lambda: logging.getLogger().level,
    "the handler of SIGINT": lambda: _read_handler(signal.SIGINT),
    "the handler of SIGTERM": lambda: _read_handler(signal.SIGTERM),
    "settings of the garbage collection": lambda: (gc.isenabled(), gc.get_threshold()),
    "Ray's connection": _read_loaded("ray", lambda ray: ray.is_initialized()),
    "MLflow's tracking URI": _read_loaded("mlflow.tracking._tracking_service.utils", lambda utils: utils._tracking_uri),
    "settings of torch": _read_loaded("torch", _read_torch),
    "a process group of torch": _read_loaded("torch.distributed", lambda distributed: distributed.is_initialized()),
}


class ModuleWatch:
    """Compares sys.modules with what it was; a copy of its 4000 entries is made only when it has grown or shrunk."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._modules: list[ModuleType] = []
        self._path: tuple[str, ...] = ()

    def start(self) -> None:
        if len(self._modules) != len(sys.modules):
            self._names, self._modules = list(sys.modules), list(sys.modules.values())
        self._path = tuple(filter(None, sys.path))

    def list_changes(self) -> list[str]:
        """Return the entries that were replaced or removed since the start, or imported from a folder added since."""
        if list(sys.modules.values()) == self._modules:
            return []
        before = dict(zip(self._names, self._modules, strict=True))
        self._modules = []
        changed = [name for name, module in before.items() if not _is_same(name, module)]
        new = [name for name in sys.modules if name not in before]
        changed += [name for name in new if not _is_installed(name, sys.modules[name], self._path)]
        return sorted(f"sys.modules[{name!r}]" for name in changed)


@contextmanager
def unchanged_process(name: str, watch: ModuleWatch | None = None) -> Iterator[None]:
    """Fail if the code in the block leaves state of the process behind.

    Args:
        name: the test or the module of tests that runs in the block.
        watch: of the tests that ran before.
    """
    watch, path = ModuleWatch() if watch is None else watch, set(sys.path)
    watch.start()
    environment, state = dict(os.environ), {what: read() for what, read in READ_STATE.items()}
    yield
    leftovers = [*watch.list_changes(), *changed_variables(environment)]
    leftovers += [f"sys.path entry {entry}" for entry in {*sys.path} ^ path if not _is_of_a_library(entry)]
    leftovers += [what for what, read in READ_STATE.items() if state[what] not in (None, read())]
    if leftovers:
        pytest.fail(f"{name} leaves behind: {', '.join(leftovers)}", pytrace=False)


def changed_variables(before: dict[str, str]) -> list[str]:
    """Return the environment variables that have another value than before."""
    names = (before.keys() | os.environ.keys()) - PROCESS_VARIABLES
    return sorted(f"os.environ[{name!r}]" for name in names if before.get(name) != os.environ.get(name))


def _is_of_a_library(folder: str) -> bool:
    return folder.startswith(sys.prefix) or folder.endswith(CUTLASS_FOLDER)


def _is_same(name: str, module: ModuleType) -> bool:
    """Return whether a module is still there, or was replaced by the library that made it.

    transformers replaces itself while it is imported, from the same file.
    """
    now = sys.modules.get(name)
    if name in TRITON_MODULES:
        return now is not None
    if now is module or name.partition(".")[0] in ("sweeper", "workloads", "tests"):
        return now is module
    file = getattr(now, "__file__", None)
    return file is not None and file == getattr(module, "__file__", None)


def _is_installed(name: str, module: ModuleType | None, path: tuple[str, ...]) -> bool:
    """Return whether a module comes from one of these folders, from Python itself, or from something compiled."""
    if module is None:
        return False
    if COMPILED.fullmatch(name) or name in TRITON_MODULES:
        return True
    file = getattr(module, "__file__", None)
    if file is not None and file.startswith("/"):
        return file.startswith(path)
    # Libraries make modules without a file: torch.ops, torch._C._acc, _cython_3_2_4.
    return getattr(module, "__spec__", None) is not None or "." in name or name.startswith("_")
