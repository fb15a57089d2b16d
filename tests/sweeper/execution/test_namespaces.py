"""The namespaces that a killed test leaves are removed by the next one."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import namespaces


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_only_namespaces_of_ended_processes_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, used = f"{namespaces.PREFIX}{ended.pid}head", namespaces.name_namespace("test")
    for name in (abandoned, used):
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            pytest.skip("this machine allows no network namespaces")
    sleeper = subprocess.Popen(["ip", "netns", "exec", abandoned, "sleep", "60"])
    try:
        while sleeper.pid not in namespaces.list_processes(abandoned):
            assert sleeper.poll() is None
        namespaces.remove_abandoned()
        assert used in namespaces.list_namespaces() and abandoned not in namespaces.list_namespaces()
        assert sleeper.wait(timeout=10) < 0
    finally:
        sleeper.kill()
        sleeper.wait()
        for name in (abandoned, used):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
