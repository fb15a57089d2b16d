"""Build the wheel with conf/ as sweeper/conf. In the repository, conf/ is at the top, where users look for it."""

from pathlib import Path
from shutil import copytree

from setuptools.command.build_py import build_py


class BuildWithConf(build_py):
    """A build step for the packages and their data. An editable installation reads conf/ in place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copytree("conf", Path(self.build_lib, "sweeper", "conf"), dirs_exist_ok=True)
