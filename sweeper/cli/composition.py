"""Use Hydra to compose each sweep's configuration from the arguments, and reduce Hydra's errors to one line."""

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig

from sweeper.cli.arguments import Arguments
from sweeper.cli.explanation import UnknownKey, explain
from sweeper.cli.sources import GROUPS, locate
from sweeper.config.catalogue import use_config_dir
from sweeper.config.environment import check_name
from sweeper.config.resolution import CONF, ResolvedConfig, resolve
from sweeper.config.schema import Config
from sweeper.config.space import BY_GPUS, NULL_CHOICE
from workloads.api.contract import Workload
from workloads.api.errors import UserInputError
from workloads.api.validation import keys_of

# Sections with keys that YAML files may omit, because the schema has these keys.
OPTIONAL_SECTIONS = (
    *("space.", "command.", "workload.", "hardware.", "topology."),
    *("limits.", "limits=", "metrics.", "metrics="),  # also as mappings
)
# Keys with values that Hydra would expand into several runs if the values were not quoted.
VALUE_KEYS = re.compile(r"(space(\.\w+)+|search\.initial_points|projection\.nodes)=")
MAX_SWEEPS = 1000  # per command with -m
VARIABLES = "space.env."
# Hydra composes a configuration twice, the first time only for the key hydra.mode. The flag -m sets the mode instead.
Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
NULL_BY_DEFAULT = {key.name for key in keys_of(Config) if key.default is None} | {"finals.top", "finals.rounds"}


@dataclass(frozen=True)
class ComposedSweep:
    config: DictConfig
    arguments: Arguments  # the arguments of a command that runs only this sweep
    workload: Workload | None = None  # a Python function, which a configuration cannot name

    @property
    def command_line(self) -> list[str]:
        return [*self.arguments.format_flags(), *self.arguments.overrides]

    def resolve(self) -> ResolvedConfig:
        """Return the validated configuration. Raises UserInputError for errors that do not depend on the device."""
        with self.located(shipped=True):
            return resolve(self.config, self.workload)

    @contextmanager
    def located(self, *, shipped: bool = False) -> Iterator[None]:
        """Add the file and line of the named key to any UserInputError that the body raises."""
        try:
            yield
        except UserInputError as error:
            raise UserInputError(locate(str(error), self.arguments, shipped=shipped)) from error


def compose_sweeps(arguments: Arguments) -> list[ComposedSweep]:
    """Return a command's sweeps, or none if it has a flag such as --cfg. Raises UserInputError for invalid input."""
    if sys.flags.optimize:
        raise UserInputError("PYTHONOPTIMIZE (or python -O): Hydra does not parse values without assertions; unset it")
    sweeps: list[ComposedSweep] = []
    folder: dict[str, str | bool] = {"config_dir": arguments.config_dir} if arguments.config_dir else {}

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def collect(composed: DictConfig) -> None:
        sweeps.append(ComposedSweep(composed, Arguments(folder, unquote(HydraConfig.get().overrides.task))))

    for override in arguments.overrides:
        _check_override(override)
    is_multirun = "multirun" in arguments.flags
    quoted = quote_spaces(arguments.overrides, multirun=is_multirun)
    if is_multirun:
        _check_count(quoted)
    use_config_dir(arguments.config_dir)
    sys.argv = ["sweeper", *arguments.format_flags(), *quoted]  # "sweeper" appears in Hydra's messages
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise argument errors instead of printing them
    try:
        collect()
    except BrokenPipeError:  # raised by --cfg and --info
        raise
    except Exception as error:
        try:
            explanation = explain(error, arguments)
        except UnknownKey:
            raise
        except Exception as nearer:  # composing the allowed values also fails
            explanation = explain(nearer, arguments)
        raise UserInputError(explanation) from error
    if not sweeps and is_multirun:  # a user's file selects a plugin
        raise UserInputError("-m: only Hydra's basic launcher and sweeper are supported (hydra/launcher=basic)")
    return sweeps


def _check_override(override: str) -> None:
    """Check that an override chooses a single name from a group, and allow only Hydra's own launcher and sweeper. Hydra
    would merge all choices of a list into one configuration, and a plugin's launcher or sweeper would run no sweep."""
    if re.match(rf"[+~]*({'|'.join(GROUPS)})=\[", override):
        raise UserInputError(f"{override}: must be one name; with -m a,b runs one sweep for each")
    if plugin := re.match(r"[+~]*hydra[/.](launcher|sweeper)\b(?!=basic$)", override):
        remedy = "on Slurm submit launch/slurm/sweep.sbatch" if plugin[1] == "launcher" else "set search=NAME"
        raise UserInputError(f"{override}: only Hydra's basic {plugin[1]} is supported; {remedy}")


def quote_spaces(overrides: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Quote ranges, choices and lists of the space in the overrides, so that the space receives them as text.

    Hydra would expand an unquoted range or choice into one run per value, and only with -m. For keys under `space.`,
    the sampler chooses the values instead. With -m, the short form a,b keeps Hydra's meaning: one sweep per value.
    Lists are quoted because Hydra rejects a list if the YAML file has a mapping for cpu and gpu.

    Raises UserInputError for an environment variable that cannot be a parameter.
    """
    quoted = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith(VARIABLES):
            check_name(key.removeprefix(VARIABLES))  # Hydra supports no other names
        if override.startswith("~") and override[1:] in NULL_BY_DEFAULT:
            quoted.append(f"++{override[1:]}=null")  # Hydra treats a null key as missing
        else:
            added = "++" if override.startswith(OPTIONAL_SECTIONS) else ""
            quoted.append(added + _quote(override, multirun))
    return quoted


def unquote(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides as a user would type them to run a single composed sweep."""
    added = tuple(f"++{section}" for section in OPTIONAL_SECTIONS)
    return tuple(override.removeprefix("++") if override.startswith(added) else override for override in overrides)


def _quote(override: str, multirun: bool) -> str:
    if not VALUE_KEYS.match(override):
        return override
    name, _, value = override.partition("=")
    if BY_GPUS.fullmatch(value):  # not of Hydra's grammar
        return f'{name}="{value}"'
    override = name + "=" + NULL_CHOICE.sub(r"[\1]", value)
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # Hydra reports the error
    key, _, text = override.partition("=")
    if parsed.is_sweep_override():
        is_short = getattr(parsed.value(), "simple_form", False)
        if multirun and is_short:
            return override
        text = f"choice({text})" if is_short else text  # the form that users write in YAML
    elif key.lstrip("+").startswith(VARIABLES) and text[:1] in ("'", '"') and "," in text:
        pass  # the commas belong to the value: keep the quotes for the space's parser
    elif not isinstance(parsed.value(), list):
        return override
    quote = Quote.single if '"' in text and "'" not in text else Quote.double
    return f"{key}={QuotedString(text, quote).with_quotes()}"


def _check_count(overrides: Sequence[str]) -> None:
    """Check that -m does not create too many sweeps, because Hydra creates all sweeps before the first sweep runs."""
    total, parser = 1.0, OverridesParser.create()
    for override in overrides:
        try:
            value = parser.parse_override(override).value()
        except HydraException:
            return  # Hydra reports the error
        if isinstance(value, ChoiceSweep):
            total *= len(value.list)
        elif isinstance(value, RangeSweep):  # infinite for a range without an end
            assert value.start is not None and value.stop is not None
            total *= max(0.0, (value.stop - value.start) / value.step) if value.step else math.inf
        if not total <= MAX_SWEEPS:
            raise UserInputError(f"{override}: -m runs one sweep for each value, at most {MAX_SWEEPS:,} in all")
