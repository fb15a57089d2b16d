"""Builds the wheel with conf/, which stands at the top of the repository where users look for it, as sweeper/conf."""

from pathlib import Path
from shutil import copytree

from setuptools.command.build_py import build_py


class BuildWithConf(build_py):
    """Builds the packages and their data; an editable installation reads conf/ where it is."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copytree("conf", Path(self.build_lib, "sweeper", "conf"), dirs_exist_ok=True)
