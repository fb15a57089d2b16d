"""Command-line overrides: as Hydra needs them, and as each sweep of a multirun gets them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.errors import HydraException

from sweeper.config.environment import check_name
from sweeper.config.schema import Config
from sweeper.config.validation import keys_of
from workloads.api.errors import UserInputError

# Sections whose keys a YAML file need not list, since the schema knows them.
OPTIONAL_SECTIONS = ("space.", "command.", "workload.", "hardware.", "limits.", "topology.")
# Keys whose value Hydra would otherwise expand into several runs.
VALUE_KEYS = re.compile(r"(space(\.\w+)+|search\.initial_points|projection\.nodes)=")
MAX_SWEEPS = 1000  # of one command with -m
VARIABLES = "space.env."
NULL_BY_DEFAULT = {key.name for key in keys_of(Config) if key.default is None} | {"finals.top", "finals.rounds"}


def quote_spaces(overrides: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Return the overrides with ranges, choices and lists of the space quoted, so that they reach it as text.

    Hydra expands a range or a choice into one run for each value, with -m only. Under `space.` it is what the sampler
    chooses from. With -m, the short form a,b keeps Hydra's meaning: one sweep for each value. A list is quoted because
    Hydra refuses one where the YAML has a mapping for cpu and gpu.

    A deletion of a key that is null by default becomes that null: Hydra takes a key that is null for a missing one.

    Raises:
        UserInputError: for an environment variable that cannot be a parameter, since Hydra has no name for it.
    """
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith(VARIABLES):
            check_name(key.removeprefix(VARIABLES))
    quoted = [_quote(_reset(override), multirun) for override in overrides]
    return [f"++{override}" if override.startswith(OPTIONAL_SECTIONS) else override for override in quoted]


def check_count(overrides: Sequence[str]) -> None:
    """Check that -m makes a number of sweeps that a person can want: Hydra makes all of them before the first runs.

    Raises:
        UserInputError: for a range without an end, or more than MAX_SWEEPS.
    """
    total, parser = 1.0, OverridesParser.create()
    for override in overrides:
        try:
            value = parser.parse_override(override).value()
        except HydraException:
            return  # Hydra reports what is wrong with it
        count = 1.0
        if isinstance(value, ChoiceSweep):
            count = len(value.list)
        elif isinstance(value, RangeSweep):
            count = _count_range(value)
        total *= count
        if not total <= MAX_SWEEPS:
            raise UserInputError(f"{override}: -m runs one sweep for each value, at most {MAX_SWEEPS:,} in all")


def _count_range(value: RangeSweep) -> float:
    """Return how many values a range has; not a finite number where it has no end."""
    assert value.start is not None and value.stop is not None
    return max(0.0, (value.stop - value.start) / value.step) if value.step else math.inf


def unquote(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a composed sweep as they are typed for it alone."""
    added = tuple(f"++{section}" for section in OPTIONAL_SECTIONS)
    return [override.removeprefix("++") if override.startswith(added) else override for override in overrides]


def _reset(override: str) -> str:
    key = override.removeprefix("~")
    return f"++{key}=null" if override.startswith("~") and key in NULL_BY_DEFAULT else override


def _quote(override: str, multirun: bool) -> str:
    """Return the override with its value quoted if Hydra would expand or refuse it."""
    if not VALUE_KEYS.match(override):
        return override
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # Hydra reports what is wrong with it
    key, _, text = override.partition("=")
    if parsed.is_sweep_override():
        is_short = getattr(parsed.value(), "simple_form", False)
        if multirun and is_short:
            return override
        text = f"choice({text})" if is_short else text  # as a person writes it in YAML
    elif key.lstrip("+").startswith(VARIABLES) and text[:1] in ("'", '"') and "," in text:
        pass  # its commas belong to the value: the quotes stay for the space's grammar
    elif not isinstance(parsed.value(), list):
        return override
    return f'{key}="{text}"' if '"' not in text else f"{key}='{text}'"
