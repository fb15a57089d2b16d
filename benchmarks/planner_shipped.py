"""Check whether the recipes that trainers ship fit in memory on the GPUs that they are shipped for.

    python benchmarks/planner_shipped.py            # compare the verdicts of planner_shipped.csv with the planner's
    python benchmarks/planner_shipped.py --write    # write the verdicts, and the tables of the guide

A row has the settings of a recipe that the planner reads, by the trainer's names, at a commit of its repository. They
are written into a file of the trainer, which is read like `layout=FILE`. The verdict `fits` is that of `fits=true`.
"""

import argparse
import csv
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":  # run as a file, not as a module
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))

from sweeper.commands.plan.answer import search
from sweeper.commands.plan.request import PlanRequest, build_problem
from workloads.api.errors import UserInputError
from workloads.estimator.search import bound_gib, find_layouts
from workloads.layouts.trainers import find_trainer

TABLE = Path(__file__).with_name("planner_shipped.csv")
GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "plan.md"
START, END = "<!-- from benchmarks/planner_shipped.py --write -->\n", "<!-- end of its tables -->"
VERDICTS = ("fits", "unsure", "no", "never", "refused")
COUNTS = """
| repository | recipes | fits | unsure | no | never | refused |
|---|---:|---:|---:|---:|---:|---:|
"""
KNOWN = """
| file | GPUs | verdict, bound in GiB | known |
|---|---|---|---|
"""
NEVER = """
| recipes whose weights, gradients and optimizer states exceed the memory | GPUs | bound in GiB |
|---|---|---:|
"""


def read_rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as lines:
        return list(csv.DictReader(lines))


def write_recipe(row: Mapping[str, str]) -> str:
    """Return a file of the row's trainer with its settings."""
    settings = dict(word.split("=", 1) for word in row["settings"].split("; "))
    values = {name: json.loads(value) for name, value in settings.items()}
    if row["format"] == "megatron":
        words = [
            f"--{name.replace('_', '-')} {'' if value is True else value}".rstrip() for name, value in values.items()
        ]
        return " \\\n    ".join(["torchrun pretrain_gpt.py", *words])
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *parents, key = name.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    if row["format"] == "torchtitan":
        return "\n".join(_toml(sections))
    module = {"framework": row["format"].removeprefix("primus "), "model": row["model_file"], "overrides": sections}
    return yaml.safe_dump({"modules": {"trainer": module}}, sort_keys=False)


def _toml(section: Mapping[str, Any], name: str = "") -> Iterator[str]:
    yield from (f"{key} = {json.dumps(value)}" for key, value in section.items() if not isinstance(value, dict))
    for key, inner in section.items():
        if isinstance(inner, dict):
            yield f"[{name}{key}]"
            yield from _toml(inner, f"{name}{key}.")


def judge(row: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """Return the verdict and the bound in GiB, or the reason of a refusal.

    `fits`: the bound fits, as for `fits=true`. `unsure`: only the estimate fits. `no`: the estimate does not fit.
    `never`: weights, gradients and the optimizer's states alone exceed the memory.
    """
    path = folder / "recipe"
    path.write_text(write_recipe(row))
    names = {"model": row["model"], "hardware": row["hardware"], "layout": str(path)}
    request = PlanRequest(**names, gpus=int(row["gpus"]), calibration="none")
    try:
        problem = build_problem(request)
        if row["memory_gib"]:
            device = replace(problem.cluster.device, memory_gib=float(row["memory_gib"]))
            problem = replace(problem, cluster=replace(problem.cluster, device=device))
        tried = find_trainer(problem.job.trainer).search
        result = find_layouts(problem.job, problem.cluster, tried, problem.fixed, 1)
        found = result.best[0] if result.best else result.smallest
        if found is None:
            search(problem)  # raises the reason
            raise AssertionError(row["path"])
    except UserInputError as error:
        return "refused", str(error).removeprefix(f"layout={path}: ").replace(str(path), "FILE")
    memory, cluster = found.estimate.memory, problem.cluster
    most_gib = bound_gib(memory, problem.job, cluster)
    states_gib = memory.parameters + memory.gradients + memory.optimizer_states
    unfit = "never" if states_gib > cluster.device.memory_gib else "no"
    verdict = (
        "fits" if most_gib <= cluster.usable_gib else "unsure" if memory.needed_gib <= cluster.usable_gib else unfit
    )
    return verdict, f"{most_gib:.0f}"


def judge_all(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return [judge(row, Path(folder)) for row in rows]


def tables(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the guide's tables: counts by repository, files with a known outcome, and recipes that can never fit."""
    recipes = [row for row in rows if row["kind"] == "recipe"]
    text = COUNTS
    for repository in dict.fromkeys(row["repository"] for row in recipes):
        of_it = [row for row in recipes if row["repository"] == repository]
        commits = ", ".join(dict.fromkeys(f"`{row['commit'][:8]}`" for row in of_it))
        counts = Counter(row["verdict"] for row in of_it)
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        text += f"| {repository} {commits} | {len(of_it)} | {numbers} |\n"
    text += KNOWN + "".join(_known_line(group) for group in _groups(rows, "evidence", ("commit", "path", "kind")))
    text += f"\n{_listed(rows)}\n{NEVER}"
    named = [row | {"never": row["verdict"] == "never" and "never"} for row in recipes]
    for group in _groups(named, "never", ("repository", "format", "model", "gpus")):
        first, bounds = group[0], sorted(int(row["gib"]) for row in group)
        cards = ", ".join(dict.fromkeys(row["hardware"] for row in group))
        trainer = f" with {first['format'].split()[1]}" if " " in first["format"] else ""
        span = str(bounds[0]) if bounds[0] == bounds[-1] else f"{bounds[0]} to {bounds[-1]}"
        files = f"{len(group)} of {first['repository']}{trainer}, {first['model']}"
        text += f"| {files} | {first['gpus']} {cards} ({first['gpus_from']}) | {span} |\n"
    return text


def _groups(rows: Sequence[Mapping[str, Any]], given: str, keys: Sequence[str]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows that have the column `given`, grouped by the other columns."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row[given]:
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from groups.values()


def _known_line(group: Sequence[Mapping[str, str]]) -> str:
    first = group[0]
    place = f"{first['repository']}@{first['commit'][:8]}: {first['path']}"
    if len({row["variant"] for row in group}) > 2:
        right = {ran: [row["verdict"] == "fits" for row in group if row["ran"] == ran] for ran in ("yes", "no")}
        verdict = f"{sum(right['yes'])} of {len(right['yes'])} that ran fit, {right['no'].count(False)} of "
        verdict += f"{len(right['no'])} that ran out of memory do not"
        numbers = sorted({int(row["gpus"]) for row in group})
        cards = f"{numbers[0]} to {numbers[-1]} {first['hardware']}"
        return f"| {place}, {len(group)} variants | {cards} | {verdict} | {first['gpus_from']} |\n"
    lines = []
    for row in group:
        cards = f"{row['gpus']} {row['hardware']}" + f" of {row['memory_gib']} GiB" * bool(row["memory_gib"])
        name = f"{place}{', ' * bool(row['variant'])}{row['variant']}"
        lines.append(f"| {name} | {cards} | {row['verdict']}, {row['gib']} | {row['evidence']} |\n")
    return "".join(lines)


def _listed(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence on the commands that a guide lists with recipes, which therefore probably run."""
    listed = [row for row in rows if row["ran"] == "listed"]
    counts = Counter(row["verdict"] for row in listed)
    paths = [row["path"].removeprefix("examples/") for row in listed if row["verdict"] == "no"]
    names = ", ".join(path.replace("/configs", "").removesuffix("-pretrain.yaml") for path in paths)
    return (
        f"Primus's guides list {len(listed)} of these recipes or commands that change them, so these probably run: "
        f"{counts['fits']} fit, {counts['unsure']} are unsure, {counts['refused']} are refused, and {counts['no']} get "
        f"a no that is probably wrong ({names})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the verdicts and the guide's tables")
    writes = parser.parse_args().write
    rows = read_rows()
    found = judge_all(rows)
    if not writes:
        changed = [row for row, (verdict, _) in zip(rows, found, strict=True) if row["verdict"] != verdict]
        for row, (verdict, text) in zip(rows, found, strict=True):
            print(f"{verdict:8}{text[:60]:>8}  {row['gpus']:>4} {row['hardware']:10} {row['path']} {row['variant']}")
        raise SystemExit(f"{len(changed)} verdicts differ from {TABLE.name}" if changed else 0)
    for row, (verdict, gib) in zip(rows, found, strict=True):
        row |= {"verdict": verdict, "gib": gib}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    before, _, rest = GUIDE.read_text().partition(START)
    GUIDE.write_text(before + START + tables(rows) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
