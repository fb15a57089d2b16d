"""Models by the planner's table, or by their Hugging Face `config.json`."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from workloads.layouts.job import Model
from workloads.models.hugging_face import UNSUPPORTED_FAMILIES, UnsupportedModel, read_hugging_face

TABLE = Path(__file__).with_name("models.csv")


@cache
def known_models() -> dict[str, Model]:
    """Return the models of the planner's table by name."""
    with TABLE.open(newline="") as lines:
        return {row["name"]: _from_row(row) for row in csv.DictReader(lines)}


def load_model(name: str) -> Model:
    """Return a model by its name in the table, or by the path of a Hugging Face `config.json`.

    Raises:
        UnsupportedModel: it is neither, or its architecture is not modelled.
    """
    if name in known_models():
        return known_models()[name]
    if name.endswith(".json"):
        return read_hugging_face(_read_json(Path(name)))
    if name in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(f"{name} is not modelled: {UNSUPPORTED_FAMILIES[name]}")
    close = difflib.get_close_matches(name, known_models(), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UnsupportedModel(
        f"unknown model '{name}'. Available: {', '.join(known_models())}, or a path to a config.json.{hint}"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModel(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel("not a Hugging Face configuration: must be a JSON object")
    return content


def _from_row(row: Mapping[str, str]) -> Model:
    kinds = {field.name: field.type for field in fields(Model)}
    values: dict[str, Any] = {}
    for name, text in row.items():
        if name in kinds:
            values[name] = text == "true" if kinds[name] == "bool" else int(text) if kinds[name] == "int" else text
    return Model(**values)
