"""The rules of the architecture: who imports whom, and which `workloads` package is imported."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

FORBIDDEN = {"sweeper": {"torch"}, "workloads": {"ray", "optuna", "mlflow", "hydra", "omegaconf", "sweeper"}}
# The packages of `sweeper`, each above those that it may import.
LAYERS = [
    {"__init__"},
    {"notebook"},
    {"__main__"},
    {"commands"},
    {"cli"},
    {"pages"},
    {"results"},
    {"tracking"},
    {"execution"},
    {"preflight"},
    {"search"},
    {"config"},
    {"metrics"},
    {"common"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


# The packages of `workloads` that describe trials without running one, each above those that it may import.
DESCRIBING = ["formats", "estimator", "layouts", "api", "models", "hardware", "suggestions", "tables"]


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, `from a import b` as both a and a.b."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def python_files(package: str) -> list[Path]:
    folder = REPOSITORY / package
    files = list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    return files


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_its_layer_allows(package: str) -> None:
    imports = {path: {module.split(".")[0] for module in imported_modules(path)} for path in python_files(package)}
    assert not {str(path): bad for path, names in imports.items() if (bad := names & FORBIDDEN[package])}


def test_sweeper_imports_only_what_describes_of_workloads() -> None:
    for path in python_files("sweeper"):
        modules = {m for m in imported_modules(path) if m.startswith("workloads.")}
        assert {module.split(".")[1] for module in modules} <= {*DESCRIBING}, path


@pytest.mark.parametrize("package", DESCRIBING)
def test_what_describes_needs_the_standard_library_and_what_is_below_it(package: str) -> None:
    """`formats` reads YAML too; the registry of `api` imports the workload that it loads."""
    below = DESCRIBING[DESCRIBING.index(package) :]
    allowed = {*sys.stdlib_module_names, *(f"workloads.{name}" for name in below), "workloads", "amdsmi", "pynvml"}
    for path in python_files(f"workloads/{package}"):
        names = {n if not n.startswith("workloads.") else ".".join(n.split(".")[:2]) for n in imported_modules(path)}
        others = {n for n in names if n not in allowed and n.split(".")[0] not in allowed - {"workloads"}}
        assert not others - ({"yaml"} if package == "formats" else set()), path


def test_each_package_imports_only_packages_below_it() -> None:
    upward = []
    for path in python_files("sweeper"):
        package = path.relative_to(REPOSITORY / "sweeper").with_suffix("").parts[0]
        for module in imported_modules(path):
            name = module.removeprefix("sweeper.").split(".")[0]
            if module.startswith("sweeper.") and name != package and LEVEL[name] <= LEVEL.get(package, len(LAYERS)):
                upward.append(f"{path.relative_to(REPOSITORY)} imports {module}")
    assert sorted(upward) == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports within functions count too: they hide a circle and do not remove it.

    A module may import the package that it belongs to, which Python imports before it in any case.
    """
    modules = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_files(package)
    }
    graph = {
        name: {other for other in imported_modules(path) & modules.keys() if not f"{name}.".startswith(f"{other}.")}
        for name, path in modules.items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_what_is_not_documented_is_imported_in_one_module_for_ray_and_one_for_hydra() -> None:
    """Names that begin with an underscore, on any level, of Ray, Optuna, MLflow and Hydra; also in programs' text."""
    private = re.compile(r"\b(ray|optuna|mlflow|hydra|omegaconf)(\.\w+)*(\.| import )_\w+")
    modules = {path.relative_to(REPOSITORY) for path in python_files("sweeper") if private.search(path.read_text())}
    allowed = {Path("sweeper/execution/ray_internals.py"), Path("sweeper/cli/composition.py")}
    assert modules == allowed, "put the use there, with a test of its own"


def test_no_attribute_of_another_object_is_private() -> None:
    """Attributes that begin with an underscore belong to `self`; those of libraries change without notice."""
    public = {"_exit", "_replace", "_fields_"}  # documented: of os, of named tuples, of ctypes
    private = []
    for path in python_files("sweeper"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr) or node.attr in public:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                private.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {ast.unparse(node)}")
    assert private == []


@pytest.mark.parametrize("package", ["preflight", "tracking", "search", "execution", "results"])
def test_logic_does_not_import_presentation(package: str) -> None:
    for path in python_files(f"sweeper/{package}"):
        modules = {module.split(".")[0] for module in imported_modules(path)} | imported_modules(path)
        assert "rich" not in modules and not any(module.startswith("sweeper.pages") for module in modules), path


def test_logic_does_not_print() -> None:
    """It returns text or calls `notify`. Commands, pages and notebooks print, and so do modules run as programs."""
    faces = ("sweeper/__main__", "sweeper/cli/", "sweeper/commands/", "sweeper/notebook/", "sweeper/pages/")
    faces += ("workloads/__main__", "workloads/api/notices", "workloads/instruments/device")
    printing = [
        str(path.relative_to(REPOSITORY))
        for path in [*python_files("sweeper"), *python_files("workloads")]
        if any(isinstance(n, ast.Name) and n.id == "print" for n in ast.walk(ast.parse(path.read_text())))
    ]
    assert [name for name in printing if not name.startswith(faces)] == []


# The only modules that use what PyTorch does not document; instruments/test_torch_internals.py tests them.
TORCH_INTERNALS = (
    "instruments/torch_internals.py",
    "llama/attention_kernels.py",
    "parallel/stage.py",
    "parallel/apply.py",
)


def test_what_pytorch_does_not_document_is_used_in_few_modules() -> None:
    allowed = {REPOSITORY / "workloads" / name for name in TORCH_INTERNALS}
    files = [path for path in python_files("workloads") if re.search(r"torch\b.*\._[a-z]", path.read_text())]
    uses = []
    for path in set(files) - allowed:
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        names = {ast.unparse(node) for node in nodes} | imported_modules(path)
        private = [name for name in names if re.match(r"torch\b.*\._(?!_)", name)]
        uses += [f"{path.relative_to(REPOSITORY)} uses {name}" for name in private]
    assert sorted(uses) == []


def test_the_driver_loads_neither_torch_nor_mlflow() -> None:
    code = "import sys, sweeper.commands.sweep.loop, sweeper.commands.sweep.main; "
    code += "print('torch' in sys.modules, 'mlflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout.split() == ["False", "False"]
