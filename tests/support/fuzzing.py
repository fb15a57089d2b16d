"""Random command lines, configuration files and imports, made by a grammar and by mutations of the documented ones."""

import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweeper.config.resolution import CONF
from sweeper.config.schema import Config
from tests.conftest import REPOSITORY
from tests.support.imports import ml_dataflow_csv, tprimat_benchmark
from workloads.api.validation import keys_of, literal_values

GROUPS = ("workload", "model", "hardware", "topology", "search")
CHOICES = {group: sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in GROUPS}
KEYS = list(keys_of(Config))
# Texts that break parsers, tables, pages, spreadsheets or terminals.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "=1+1",
    "+1",
    "@SUM(A1)",
    "-1+cmd",
    "\x1b[31mred\x1b]0;title\x07",
    "\x00",
    "\r\n",
    "\u202eoverride\u202c",
    "\ud7ff\U0010ffff",
    "A" * 20_000,
    "{{}}{x}{",
    "$(touch escaped)",
    "`touch escaped`",
    "../../escaped",
    "/proc/self/mem",
    "!!python/object/apply:os.system ['touch escaped']",
    "!!python/name:os.system",
    "${oc.env:HOME}",
    "${oc.decode:'[1'}",
    "${.}",
    "${workload}",
    "${hydra:runtime}",
    "???",
    "%s%n",
    "\\",
    "''",
    '"',
    "None",
    "~",
    "&a [*a]",
)
NUMBERS = (
    "0",
    "-0.0",
    "1",
    "-1",
    "2",
    "3.5",
    "7",
    "16",
    "1e3",
    "1e308",
    "1e999",
    "-inf",
    "nan",
    "0x10",
    "1_000",
    "010",
)
NUMBERS += ("9223372036854775808", "1" + "0" * 400, "1e-320", "true", "false", "null")
SPACES = ("range({0},{1})", "range({0},{1},{2})", "choice({0},{1},{2})", "interval({0},{1})", "tag(log,range({0},{1}))")
SPACES += (
    "tag(log,interval({0},{1}))",
    "[{0},{1}]",
    "{0},{1}",
    "divisors(gpus)",
    "multiple(gpus,{0})",
    "sort({0},{1})",
)
SPACES += ("{{cpu: {0}, gpu: {1}}}", "{{a: {0}, b: [{1}, {{c: {2}}}]}}", "range(", "choice()", "cast({0})", "glob(*)")
FLAGS = (
    "--help",
    "--version",
    "-m",
    "--cfg",
    "--cfg=job",
    "--resolve",
    "--info",
    "-p",
    "--config-dir=conf",
    "-cd",
    "--",
)
FLAGS += (
    "--hydra-help",
    "-r",
    "--package=search",
    "--confg",
    "-",
    "---",
    "--experimental-rerun",
    "-sc",
    "-cp=/",
    "-cn=x",
)


@dataclass(frozen=True)
class Case:
    """A command line, and the files of its working directory by their relative paths."""

    words: Sequence[str]
    files: Mapping[str, bytes] = field(default_factory=dict)


def documented_commands() -> list[list[str]]:
    """Return the arguments of the sweeps in README.md and docs/, without those that join a cluster."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    lines = {line for page in pages for line in re.findall(r"python -m sweeper( [^`#\n]*)", page.read_text())}
    commands = []
    for line in sorted(lines):
        try:
            commands.append(shlex.split(line))
        except ValueError:
            continue
    return commands


def documented_files() -> dict[str, bytes]:
    """Return the configuration files of the guides by their names."""
    page = "\n".join(path.read_text() for path in sorted((REPOSITORY / "docs" / "guides").glob("*.md")))
    blocks = re.findall(r"```yaml\n((?:# @package _global_\n)?# (\S+\.yaml)\n.+?)```", page, re.DOTALL)
    return {name: text.encode() for text, name in blocks}


DOCUMENTED = documented_commands()
DOCUMENTED_FILES = documented_files()
SHIPPED = sorted(path for path in CONF.rglob("*.yaml"))
LOGS = sorted((REPOSITORY / "tests" / "samples" / "logs").iterdir())


def random_text(rng: random.Random) -> str:
    """Return a hostile text, a number or a few random characters."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(HOSTILE)
    if kind < 0.7:
        return rng.choice(NUMBERS)
    alphabet = "abcxyz0159.,:;=+-~/\\[]{}()<>'\"`$%&|*?!@#^_ \t\n\x7f\u00e9\u4e2d\u2028\U0001f600"
    return "".join(rng.choices(alphabet, k=rng.randint(0, 12)))


def random_value(rng: random.Random) -> str:
    """Return a value as the command line takes it."""
    if rng.random() < 0.35:
        return rng.choice(SPACES).format(
            *(random_text(rng) if rng.random() < 0.2 else rng.choice(NUMBERS) for _ in "012")
        )
    if rng.random() < 0.5:
        return rng.choice(NUMBERS)
    text = random_text(rng)
    return f'"{text}"' if rng.random() < 0.6 and '"' not in text else text


def random_override(rng: random.Random) -> str:
    """Return key=value for a key of the configuration, its space or its groups."""
    kind = rng.random()
    if kind < 0.3:
        group = rng.choice(GROUPS)
        return f"{group}={rng.choice(CHOICES[group])}"
    if kind < 0.5:
        parameter = rng.choice(
            ("m", "n", "k", "x", "dtype", "model", "tp", "sequence_length", "env.NCCL_DEBUG", "seed")
        )
        return f"space.{parameter}={random_value(rng)}"
    key = rng.choice(KEYS)
    allowed = literal_values(key.annotation)
    value = rng.choice(allowed) if allowed and rng.random() < 0.5 else random_value(rng)
    return f"{rng.choice(('', '', '', '+', '++', '~'))}{key.name}={value}"


def mutate_text(rng: random.Random, text: str, times: int = 1) -> str:
    """Change characters of a text: insert, delete, repeat or exchange some."""
    for _ in range(times):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.randint(1, 4))
        replacement = rng.choice(("", "", text[start:end] * 2, text[start:end][::-1], random_text(rng)))
        text = text[:start] + replacement + text[end:]
    return text


def mutate_words(rng: random.Random, words: Sequence[str]) -> list[str]:
    """Change one word of a command line."""
    words = list(words)
    place = rng.randint(0, len(words))
    kind = rng.randint(0, 9)
    if kind == 0 and words:
        del words[place - 1]
    elif kind == 1 and words:
        words.insert(place, rng.choice(words))
    elif kind == 2 and words:
        words[place - 1] = mutate_text(rng, words[place - 1])
    elif kind == 3 and words:
        words[place - 1] = words[place - 1].partition("=")[0] + "=" + random_value(rng)
    elif kind == 4:
        words.insert(place, rng.choice(FLAGS))
    else:
        words.insert(place, random_override(rng))
    return words


def random_command(rng: random.Random) -> Case:
    """Return a command line of a sweep; in a third of the cases with a configuration file of its own."""
    words = (
        list(rng.choice(DOCUMENTED)) if rng.random() < 0.5 else [random_override(rng) for _ in range(rng.randint(0, 4))]
    )
    if rng.random() < 0.6:
        words.append("hardware=cpu")
    files = dict(DOCUMENTED_FILES) if "my_conf" in words else {}
    if rng.random() < 0.33 and not files:
        group = rng.choice(("workload", "workload", "workload", "topology", "search", "model", "hardware"))
        files[f"conf/{group}/own.yaml"] = random_yaml(rng, group)
        words += ["--config-dir=conf", f"{group}=own"]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        words = mutate_words(rng, words)
    words = [without_nul(word) for word in words]
    return Case(["plan=true", *words, "plan=true"], files)  # a flag may take the last word


def without_nul(word: str) -> str:
    """Return the word as a process can get it: without zero bytes."""
    return word.replace("\0", "")


def random_yaml(rng: random.Random, group: str) -> bytes:
    """Return a mutated file of the group."""
    path = rng.choice([path for path in SHIPPED if path.parent.name == group])
    lines = path.read_text().splitlines()
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        place = rng.randrange(len(lines))
        kind = rng.randint(0, 6)
        if kind == 0:
            lines[place] = mutate_text(rng, lines[place])
        elif kind == 1:
            lines[place] = lines[place].partition(":")[0] + ": " + random_value(rng)
        elif kind == 2:
            lines.insert(place, lines[rng.randrange(len(lines))])
        elif kind == 3:
            lines[place] = " " * rng.randint(0, 6) + lines[place].strip()
        elif kind == 4:
            lines.insert(place, f"{mutate_text(rng, rng.choice(KEYS).name)}: {random_value(rng)}")
        elif kind == 5:
            lines[place] = lines[place].partition(":")[0] + ": " + "[" * 200
        elif len(lines) > 1:
            del lines[place]
    content = "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"
    return mutate_bytes(rng, content) if rng.random() < 0.1 else content


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Exchange, delete or insert bytes at a random place."""
    start = rng.randint(0, len(content))
    end = min(len(content), start + rng.choice((0, 1, 8, 1000)))
    return content[:start] + rng.choice((b"", rng.randbytes(end - start + 1), content[start:end] * 3)) + content[end:]


def random_import(rng: random.Random) -> Case:
    """Return the import of a mutated log, benchmark or table."""
    import json

    name, content = rng.choice(
        (
            lambda: ("a.log", rng.choice(LOGS).read_bytes()),
            lambda: ("a.log", rng.choice(LOGS).read_bytes()),
            lambda: ("h100.json", json.dumps(tprimat_benchmark(), indent=1).encode()),
            lambda: ("a.csv", ml_dataflow_csv(*[{}] * rng.randint(1, 4)).encode()),
        )
    )()
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        content = rng.choice(IMPORT_MUTATIONS)(rng, content)
    words = [name, "--check"]
    for _ in range(rng.choice((0, 0, 0, 1))):
        words.insert(
            rng.randint(0, 2), rng.choice(("device=h100", "--device", "dir=x", "tracking.uri=foo", "--x", "b.log"))
        )
    return Case(words, {name: content})


def _replace_number(rng: random.Random, content: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+(?:\.\d+)?", content))
    if not numbers:
        return content
    match = rng.choice(numbers)
    return content[: match.start()] + rng.choice(NUMBERS).encode() + content[match.end() :]


def _replace_word(rng: random.Random, content: bytes) -> bytes:
    words = list(re.finditer(rb"[A-Za-z_]+", content))
    if not words:
        return content
    match = rng.choice(words)
    return content[: match.start()] + random_text(rng).encode("utf-8", "surrogatepass") + content[match.end() :]


def _change_lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    place = rng.randrange(len(lines))
    kind = rng.randint(0, 3)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), lines[place])
    elif kind == 2:
        lines = lines[: place + 1]
    else:
        rng.shuffle(lines)
    return b"".join(lines)


def _join(rng: random.Random, content: bytes) -> bytes:
    return content + rng.choice(LOGS).read_bytes()


IMPORT_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _replace_number,
    _replace_number,
    _replace_word,
    _change_lines,
    _join,
    mutate_bytes,
)


def sample_path(case: Case, folder: Path) -> None:
    """Write the files of a case."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
