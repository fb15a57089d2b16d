"""Define subcommands. One dataclass per verb declares its arguments, and supplies messages and help.

    @dataclass(frozen=True, kw_only=True)
    class CompareRequest(StoreRequest):
        first: str = word("A")          # sweeper report compare A B dir=results --quick
        second: str = word("B")
        quick: bool = switch()

A word (positional argument) is required (`str`), optional (`str | None`) or repeated (`list[str]`). Other fields are
settings, written as `key=value` as in a sweep's configuration. A nested dataclass is a section, such as `tracking.uri`.
"""

import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

from sweeper.cli.exits import exit_with
from sweeper.config.schema import Config
from sweeper.preflight.kept_rows import FOLDER
from workloads.api.errors import UserInputError, describe_os_error
from workloads.api.validation import Key, build, keys_of, literal_values, read_value
from workloads.suggestions import hint, nearest, suggest
from workloads.tables import read_toml

T = TypeVar("T")
# The dataclass of each verb, and the function that returns the exit code. The key "" is for a command without a verb.
Verbs = Mapping[str, tuple[type[Any], Callable[[Any], int]]]
SUBCOMMANDS: dict[str, str] = read_toml(__file__, "subcommands.toml")
SYNONYMS: dict[str, dict[str, list[str]]] = read_toml(__file__, "synonyms.toml")
COMMAND_NAMES, SETTING_NAMES = (
    {typed: name for name, others in SYNONYMS[kind].items() for typed in others} for kind in ("subcommand", "setting")
)
KEY = re.compile(r"[A-Za-z_][\w.]*")
# The column at which the meaning of a key starts: next to the name, or below the name on a narrow terminal.
COLUMN, NARROW_COLUMN = 28, 8
NARROW = 72


def word(name: str, default: Any = MISSING) -> Any:
    """Declare a positional argument that the help shows as `name`."""
    return field(default=default, metadata={"word": name})


def words(name: str, least: int = 0) -> dict[str, Any]:
    """Return the metadata of a list field that takes at least `least` positional arguments."""
    return {"word": name, "least": least}


def switch() -> Any:
    """Declare a switch. The flag `--name` sets the switch to true."""
    return field(default=False, metadata={"switch": True})


@dataclass(frozen=True)
class Tracking:
    """The MLflow store.

    Attributes:
        uri: the MLflow store; by default the store in `dir`.
    """

    uri: str | None = None


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster.

    Attributes:
        address: address of a running Ray cluster, HOST:PORT or auto; by default RAY_ADDRESS, else a local cluster.
        insecure: also join a cluster that accepts unauthenticated connections.
    """

    address: str | None = None
    insecure: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """A request that reads the results in a directory and an MLflow store.

    Attributes:
        dir: results directory.
    """

    dir: str = "."
    tracking: Tracking = field(default_factory=Tracking)

    def open_uri(self) -> str:
        """Return the store's URI. Raises UserInputError at once if no server responds; MLflow retries for minutes."""
        from sweeper.tracking.mlflow_store import check_uri, default_uri, name_ignored_store

        if not self.tracking.uri:
            folder = Path(self.dir).expanduser()
            name_ignored_store(folder)
            return default_uri(folder)
        if not self.tracking.uri.startswith("sqlite"):
            check_uri(self.tracking.uri)
        return self.tracking.uri


@dataclass(frozen=True)
class Subcommand:
    """A subcommand with its verbs, such as `sweeper list` and `sweeper list follow`."""

    name: str
    page: str  # the beginning of the help page
    verbs: Verbs
    default: str = ""  # the verb that may be omitted

    def main(self, arguments: Sequence[str]) -> NoReturn:
        exit_with(lambda: self.run(arguments), f"sweeper {self.name}")

    def run(self, arguments: Sequence[str]) -> int:
        """Run the verb at the start of the arguments, and return the exit code."""
        if "--help" in arguments or "-h" in arguments:
            print(self.render_help())
            return 0
        named = bool(arguments) and arguments[0] in self.verbs
        verb = arguments[0] if named else self.default
        cls, run = self.verbs[verb]
        return run(_Reader(self, verb, cls).read(arguments[1:] if named else arguments))

    def owner(self, name: str) -> str:
        """Return the usage of the first verb with this setting or switch; empty if no verb has it."""
        for verb, (cls, _) in self.verbs.items():
            if name in {key.name for key in keys_of(cls) if "word" not in key.bounds}:
                return self.usage(verb)
        return ""

    def usage(self, verb: str) -> str:
        """Return the usage of a verb: the command and its positional arguments, without settings."""
        parts = ["sweeper", self.name, f"[{verb}]" if verb and verb == self.default else verb]
        for key in [key for key in keys_of(self.verbs[verb][0]) if "word" in key.bounds]:
            name = f"{key.bounds['word']}{'…' if get_origin(key.annotation) is list else ''}"
            parts.append(name if _is_needed(key) else f"[{name}]")
        return " ".join(filter(None, parts))

    def describe(self, verb: str) -> dict[str, str]:
        """Return the meaning of each argument of a verb, and of adjacent arguments that share it."""
        keys = [key for key in keys_of(self.verbs[verb][0]) if "word" not in key.bounds or key.meaning]
        return {" ".join(map(_name_of, same)): meaning for meaning, same in groupby(keys, _describe_key)}

    def render_help(self) -> str:
        """Return the help page for all verbs, wrapped to the terminal's width."""
        width = min(max(shutil.get_terminal_size().columns, 60), 100)
        blocks = [wrap(re.sub(r"(?<=\S)\n(?=\S)", " ", self.page.strip()), width)]
        shown: dict[str, str] = {}
        for verb in self.verbs:
            described = self.describe(verb)
            repeated = " ".join(name for name, text in described.items() if shown.get(name) == text)
            new = {name: text for name, text in described.items() if shown.get(name) != text}
            listed = [*([(repeated, "as above")] if repeated else []), *new.items()]
            blocks.append(f"{self.usage(verb)}:\n{rows(listed, width)}")
            shown |= new
        return "\n\n".join(filter(None, blocks))


def read_request(cls: type[T], arguments: Sequence[str]) -> T:
    """Parse arguments into a request. Raises UserInputError for an unknown or invalid argument."""
    request: T = _Reader(Subcommand("", "", {"": (cls, lambda _: 0)}), "", cls).read(arguments)
    return request


class _Reader:
    def __init__(self, command: Subcommand, verb: str, cls: type[Any]) -> None:
        self.command, self.verb, self.cls = command, verb, cls
        keys = list(keys_of(cls))
        self.words = [key for key in keys if "word" in key.bounds]
        self.switches = {_name_of(key): key for key in keys if "switch" in key.bounds}
        self.settings = {key.name: key for key in keys if not {"word", "switch"} & key.bounds.keys()}

    def read(self, arguments: Sequence[str]) -> Any:
        values: dict[str, Any] = {}
        plain: list[str] = []
        typed: dict[str, str] = {}
        arguments = _as_settings(arguments) if "config_dir" in self.settings else arguments
        for number, argument in enumerate(arguments):
            name, sign, text = argument.partition("=")
            if argument in self.switches:
                values[self.switches[argument].name] = True
            elif argument.startswith("-") and argument != "-":
                raise UserInputError(self._explain_flag(argument, arguments[number + 1 :]))
            elif sign and name in self.settings:
                if name in typed:
                    raise UserInputError(f"{name}: given twice, as {typed[name]} and {argument}. Give it once")
                typed[name] = argument
                section, _, inner = name.rpartition(".")
                (values.setdefault(section, {}) if section else values)[inner] = read_value(self.settings[name], text)
            elif sign and not (self.words and (not KEY.fullmatch(name) or Path(argument).exists())):
                raise UserInputError(self._explain_key(name, argument, arguments))
            else:
                plain.append(argument)
        usage = f"Usage: {self.command.usage(self.verb)}; see --help"
        for key in self.words:
            if not plain and _is_needed(key):
                raise UserInputError(f"{key.bounds['word']}: missing. {usage}")
            if get_origin(key.annotation) is list:
                values[key.name], plain = plain, []
            elif plain:
                values[key.name] = plain.pop(0)
        if plain and (self.words or self.verb):
            raise UserInputError(f"{plain[0]}: one word too many. {usage}")
        if plain:
            verbs = [verb for verb in self.command.verbs if verb]
            reason = "unknown word" if verbs else "not of the form key=value"
            from sweeper.config.resolution import CONF  # imports Hydra, which valid commands do not need

            chosen = [key for key in self.settings if (CONF / key / f"{plain[0]}.yaml").is_file()]
            meant = f"Did you mean {chosen[0]}={plain[0]}?" if chosen else suggest(plain[0], verbs or self.settings)
            if (successor := COMMAND_NAMES.get(plain[0])) and successor.split(" ")[0] == self.command.name:
                meant = f"Did you mean sweeper {successor}?"
            raise UserInputError(f"{plain[0]}: {reason}. {meant}")
        return build(self.cls, values)

    def _explain_flag(self, flag: str, following: Sequence[str]) -> str:
        name, sign, value = flag.lstrip("-").partition("=")
        value = value if sign else next((text for text in following if not text.startswith("-")), "VALUE")
        key = SETTING_NAMES.get(name, name.replace("-", "_"))
        key = key if key in self.settings else name.replace("-", "_")
        if key in self.settings:
            annotation = self.settings[key].annotation
            return f"{flag}: a setting is written without dashes: {key}={'true' if annotation is bool else value}"
        if sign and f"--{name}" in self.switches:
            return f"{flag}: a switch has no value: --{name}"
        if key in self.command.verbs:
            return f"{flag}: written without dashes: sweeper {self.command.name} {key} {' '.join(following)}".rstrip()
        if owner := self.command.owner(key):
            return self._explain_owner(flag, owner)
        forms = {key.name: _name_of(key) for key in [*self.settings.values(), *self.switches.values()]}
        close = nearest(key, forms)
        meant = f" Did you mean {forms[close]}?" if close else ""
        return f"{flag}: unknown flag.{meant} Available: {', '.join([*self.switches, '--help'])}."

    def _explain_owner(self, argument: str, owner: str) -> str:
        return f"{argument}: `{self.command.usage(self.verb)}` does not take it; `{owner}` does"

    def _explain_key(self, name: str, argument: str, arguments: Sequence[str]) -> str:
        if not name:
            return f"{argument}: not of the form key=value. Available: {', '.join(self.settings)}."
        if (flag := f"--{name.replace('_', '-')}") in self.switches:
            return f"{argument}: a switch is written {flag}"
        if owner := self.command.owner(name):
            return self._explain_owner(argument, owner)
        if (key := SETTING_NAMES.get(name)) in self.settings:
            return f"{name}: unknown key. It is written {key}{argument[len(name) :]}"
        last = name.rpartition(".")[2]
        roots = {key.name.partition(".")[0] for key in keys_of(Config)}
        if name.partition(".")[0] in roots:
            close = hint(last, [f"{key}=" for key in self.settings])
            sweep = f"sweeper {shlex.join(item for item in arguments if re.split('[.=]', item)[0] in roots)}"
            return f"{argument}: a key of a sweep (`{sweep}`), not of `sweeper {self.command.name}`.{close}"
        return f"{name}: unknown key. {suggest(last, self.settings)}"


def _as_settings(arguments: Sequence[str]) -> list[str]:
    settings = list[str]()
    rest = iter(arguments)
    for argument in rest:
        flag, sign, value = argument.partition("=")
        if flag in ("--config-dir", "-cd") and (value := value if sign else next(rest, "")):
            argument = f"config_dir={value}"
        settings.append(argument)
    return settings


def _name_of(key: Key) -> str:
    if "switch" in key.bounds:
        return f"--{key.name.replace('_', '-')}"
    return str(key.bounds["word"]) if "word" in key.bounds else f"{key.name}="


def _is_needed(key: Key) -> bool:
    return bool(key.bounds["least"]) if get_origin(key.annotation) is list else key.default is MISSING


def _describe_key(key: Key) -> str:
    meaning = key.meaning.replace("`", "").rstrip(".")
    if {"word", "switch"} & key.bounds.keys():
        return meaning
    allowed = key.allowed().replace(" or null", "")
    is_plain = allowed == "a string" or all(value in meaning for value in literal_values(key.annotation) or [""])
    default = f"{key.default:.3g}" if isinstance(key.default, float) else str(key.default).lower()
    shown = "required" if key.default is MISSING else f"default: {default}" if key.default not in (None, "") else ""
    details = [key.unit, "" if is_plain and "least" not in allowed else allowed, shown]
    return f"{meaning} [{'; '.join(filter(None, details))}]" if any(details) else meaning


def rows(pairs: Iterable[tuple[str, str]], width: int) -> str:
    """Format names and their meanings in two columns. If a name is long, its meaning starts on the next line."""
    column = COLUMN if width >= NARROW else NARROW_COLUMN
    lines = list[str]()
    for name, meaning in pairs:
        wrapped = wrap(meaning, width, " " * column).splitlines()
        if len(name) + 4 <= column and wrapped:
            wrapped[0] = f"  {name}{wrapped[0][len(name) + 2 :]}"
        else:
            lines.append(f"  {name}")
        lines += wrapped
    return "\n".join(lines)


def wrap(text: str, width: int, indent: str = "") -> str:
    """Wrap the text to lines of at most `width` characters. Lines that are already indented stay unchanged."""
    wrapper = textwrap.TextWrapper(width, indent, indent, break_long_words=False, break_on_hyphens=False)
    lines = list[str]()
    for paragraph in text.splitlines() or [""]:
        lines += wrapper.wrap(paragraph) if paragraph and not paragraph.startswith(" ") else [paragraph]
    return "\n".join(lines)


def check_output_file(key: str, path: Path) -> None:
    """Check, before any work begins, that a path can be an output file. Raises UserInputError if it cannot be one."""
    if not path.parent.is_dir():
        raise UserInputError(f"{key}={path}: {path.parent}: no such directory")
    if path.is_dir():
        raise UserInputError(f"{key}={path}: is a directory. Give the name of a file in it")


def output_path(out: str | None, directory: str, name: str) -> Path:
    """Return the path `out`, or by default the file `name` in a directory's sweeps folder."""
    if out is not None:
        return Path(out)
    path = Path(directory) / FOLDER / name
    with writing("out", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Raise a UserInputError that names the setting `key` if the body fails to write the file."""
    try:
        yield
    except OSError as error:
        raise UserInputError(f"{key}={path}: cannot be written: {describe_os_error(error)}") from error
