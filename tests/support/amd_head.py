"""A head of real Ray that sees the GPUs of the stand-in `amdsmi`, and requires a token."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import environment, wait_for
from tests.support import lean_ray
from tests.support.amd import stand_in_environment


@dataclass(frozen=True)
class TokenCluster:
    address: str
    token: Path

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a command that uses this cluster."""
        return {"RAY_AUTH_TOKEN_PATH": str(self.token), "RAY_ADDRESS": self.address}


@contextmanager
def amd_head(folder: Path) -> Iterator[TokenCluster]:
    """Start Ray on a node with eight MI300X, eight cores and a site's CUDA_VISIBLE_DEVICES."""
    token = folder / "token"
    token.write_text("of-this-cluster" * 3)
    arguments = ["--head", "--port=0", "--num-cpus=8", "--block", "--include-dashboard=false", f"--temp-dir={folder}"]
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    env = environment(**variables, **lean_ray.VARIABLES, **stand_in_environment())
    head = subprocess.Popen(lean_ray.command(*arguments), env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        address_file = folder / "ray_current_cluster"
        yield TokenCluster(wait_for(lambda: address_file.exists() and address_file.read_text()), token)
    finally:
        os.killpg(head.pid, signal.SIGKILL)
