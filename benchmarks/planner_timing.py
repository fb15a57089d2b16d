"""Measure the CPU seconds that plans take, including startup.

    python benchmarks/planner_timing.py [--gpus 64 512 4096] [--repeats 5]

`python -m sweeper plan` searches all layouts of Llama 3 70B, or of a model with experts, for the fastest ones;
`plan=true` lists the layouts in the search space of `workload=parallel`. CPU seconds are user plus system time of one
process, the minimum of several runs. Other processes on the machine increase them too, since hyperthreads and caches
are shared.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COMMANDS = {
    "sweeper plan": ("-m", "sweeper", "plan", "model=llama3_70b", "hardware=h100", "trainer=torchtitan"),
    "Qwen3-30B": ("-m", "sweeper", "plan", "model=qwen3_30b_a3b", "hardware=h100", "trainer=own"),
    "Qwen3-235B": ("-m", "sweeper", "plan", "model=qwen3_235b_a22b", "hardware=h100", "trainer=torchtitan"),
    "DeepSeek-V3": ("-m", "sweeper", "plan", "model=deepseek_v3", "hardware=h100", "trainer=megatron"),
    "plan=true": ("-m", "sweeper", "workload=parallel", "model=llama3_70b", "hardware=h100", "plan=true"),
}
FEWEST_GPUS = {"Qwen3-235B": 512, "DeepSeek-V3": 512}  # on fewer, the model does not fit


def cpu_seconds(words: Sequence[str], folder: str) -> float:
    """Return the CPU seconds of a command. Raises subprocess.CalledProcessError if it failed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for gpus in args.gpus:
            for name in [name for name in COMMANDS if gpus >= FEWEST_GPUS.get(name, 0)]:
                fewest_s = min(cpu_seconds([*COMMANDS[name], f"gpus={gpus}"], folder) for _ in range(args.repeats))
                print(f"{name:14} {gpus:5} GPUs: {fewest_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
