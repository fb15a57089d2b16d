"""Measure your own function: with which piece size does this machine add two large arrays fastest?

python own_workload.py
"""

import time

import sweeper


def add(piece_kib: int, mib: int = 16) -> dict[str, object]:
    """Add two arrays piece by piece and return the times and bytes, from which sweeper derives the rates."""
    import numpy as np

    first = np.ones(mib * 2**20 // 4, np.float32)
    second, result = first.copy(), np.empty(piece_kib * 256, np.float32)
    times_s = []
    for _ in range(20):
        total = 0.0
        started_s = time.perf_counter()
        for start in range(0, len(first), len(result)):
            piece = slice(start, start + len(result))
            np.add(first[piece], second[piece], out=result)
            total += float(result[0])
        times_s.append(time.perf_counter() - started_s)
        if total != 2.0 * len(first) / len(result):
            raise ValueError("a sum is wrong")
    return {"step_times_s": times_s[5:], "bytes_per_step": 2 * first.nbytes, "statistic": "median"}


if __name__ == "__main__":
    space = {"piece_kib": [4, 64, 4096]}
    print(sweeper.run(add, "name=add", "hardware=cpu", "search=grid", "workload.objective=gb_per_s", space=space))
