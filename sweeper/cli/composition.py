"""From the arguments to one configuration for each sweep: Hydra composes, its errors become one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from yaml import YAMLError

from sweeper.cli import overrides
from sweeper.cli.arguments import Arguments
from sweeper.cli.explanation import explain
from sweeper.cli.groups import GROUPS
from sweeper.cli.location import locate
from sweeper.config.catalogue import use_config_dir
from sweeper.config.resolution import CONF, ResolvedConfig, resolve
from workloads.api.contract import Workload
from workloads.api.errors import UserInputError


@dataclass(frozen=True)
class ComposedSweep:
    """The configuration of one sweep.

    Attributes:
        arguments: those of a command that runs this sweep alone.
        workload: what it runs, where no name stands for that: a function.
    """

    config: DictConfig
    arguments: Arguments
    workload: Workload | None = None

    @property
    def command_line(self) -> list[str]:
        return [*self.arguments.format_flags(), *self.arguments.overrides]

    def resolve(self) -> ResolvedConfig:
        """Return the checked configuration.

        Raises:
            UserInputError: for what is wrong whatever the device, with its file and line if it stands in a file.
        """
        with self.located(shipped=True):
            return resolve(self.config, self.workload)

    @contextmanager
    def located(self, *, shipped: bool = False) -> Iterator[None]:
        """Raise UserInputError of the body with the file and line of the key that it names."""
        try:
            yield
        except UserInputError as error:
            raise UserInputError(locate(str(error), self.arguments, shipped=shipped)) from error


def _check_groups(arguments: Arguments) -> None:
    """Check that no group has a list, of which Hydra would compose all, each over the one before."""
    for override in arguments.overrides:
        if re.match(rf"[+~]*({'|'.join(GROUPS)})=\[", override):
            raise UserInputError(f"{override}: must be one name; with -m a,b runs one sweep for each")


def _check_launcher(arguments: Arguments) -> None:
    """Check that Hydra composes with its own launcher and sweeper: another would compose where nobody runs the result.

    They are plugins for programs that Hydra starts. Here Ray starts trials and Optuna chooses them.
    """
    for override in arguments.overrides:
        plugin = re.match(r"[+~]*hydra[/.](launcher|sweeper)\b(?!=basic$)", override)
        if plugin:
            remedy = "on Slurm submit launch/slurm/sweep.sbatch" if plugin[1] == "launcher" else "set search=NAME"
            raise UserInputError(f"{override}: only Hydra's basic {plugin[1]} is supported; {remedy}")


def _explain(error: Exception, arguments: Arguments) -> str:
    """Return the error in a line; where what is allowed cannot be composed either, the error of that."""
    try:
        return explain(error, arguments)
    except (YAMLError, MissingConfigException) as nearer:
        return explain(nearer, arguments)


def compose_sweeps(arguments: Arguments) -> list[ComposedSweep]:
    """Return the sweeps of a command; none with a flag such as --cfg, for which Hydra prints what it asks for.

    Raises:
        UserInputError: if the configuration cannot be composed.
    """
    sweeps: list[ComposedSweep] = []
    folder: dict[str, str | bool] = {"config_dir": arguments.config_dir} if arguments.config_dir else {}

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def collect(composed: DictConfig) -> None:
        typed = overrides.unquote(HydraConfig.get().overrides.task)
        sweeps.append(ComposedSweep(composed, Arguments(folder, tuple(typed))))

    use_config_dir(arguments.config_dir)
    _check_groups(arguments)
    _check_launcher(arguments)
    is_multirun = "multirun" in arguments.flags
    quoted = overrides.quote_spaces(arguments.overrides, multirun=is_multirun)
    if is_multirun:
        overrides.check_count(quoted)
    sys.argv = ["sweeper", *arguments.format_flags(), *quoted]  # the name in Hydra's messages
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra prints what is wrong with the arguments, or with this raises it
    try:
        collect()
    except BrokenPipeError:  # of --cfg and --info
        raise
    except Exception as error:
        raise UserInputError(_explain(error, arguments)) from error
    if not sweeps and is_multirun:  # a file of the user's has selected a plugin
        raise UserInputError("-m: only Hydra's basic launcher and sweeper are supported (hydra/launcher=basic)")
    return sweeps
