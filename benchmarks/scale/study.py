"""Asks and tells of the study with its journal, by sampler and number of running trials."""

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

STUDIES = (("tpe", 8), ("tpe", 64), ("tpe", 1000), ("tpe", 8000), ("random", 64), ("random", 8000))
ENDED_BEFORE = 1000  # trials that have ended before the first measured round
ROUNDS = 10
TRIALS_A_ROUND = 50  # that end in a round of the loop, and are replaced


def measure_asks_and_tells(folder: Path, sampler: str, running: int) -> dict[str, Any]:
    """Return the CPU time of an ask and a tell in ms, and the syncs to the disk of a round."""
    from sweeper.common.trials import Trial, TrialRecord, TrialStatus
    from sweeper.config.schema import Search
    from sweeper.config.space import Range, Space
    from sweeper.metrics.criteria import Criteria
    from sweeper.search.study import Study

    space = Space({name: Range(64, 65472, 64) for name in "mnk"})
    criteria = Criteria.of({"score": "maximize"})
    study = Study(folder / f"{sampler}-{running}.journal", {}, space, Search(sampler), 0, criteria)
    rng, trials = random.Random(0), []

    def ask() -> None:
        trial = study.ask()
        assert trial is not None
        trials.append(trial)

    def tell(trial: Trial) -> None:
        metrics = {"score": -sum(abs(float(value) - 30_000) for value in trial.params.values())}
        record = TrialRecord(trial.number, trial.params, TrialStatus.COMPLETE, "", "", metrics, [], {}, 0.0, 60.0, 0.0)
        study.tell(record)

    def end_one() -> Trial:
        return trials.pop(rng.randrange(min(len(trials), 200)))

    while len(trials) < running:
        ask()
    for _ in range(ENDED_BEFORE):
        tell(end_one())
        ask()
    syncs, fsync = [0], os.fsync

    def count_sync(descriptor: int) -> None:
        syncs[0] += 1
        fsync(descriptor)

    os.fsync = count_sync
    ask_ms, tell_ms = [], []
    for _ in range(ROUNDS):
        started_s = time.process_time()
        for _ in range(min(TRIALS_A_ROUND, running)):
            tell(end_one())
        told_s = time.process_time()
        while len(trials) < running:
            ask()
        study.sync()
        count = min(TRIALS_A_ROUND, running)
        tell_ms.append(1e3 * (told_s - started_s) / count)
        ask_ms.append(1e3 * (time.process_time() - told_s) / count)
    os.fsync = fsync
    return {
        "sampler": sampler,
        "running": running,
        "ask_ms": statistics.median(ask_ms),
        "tell_ms": statistics.median(tell_ms),
        "per_s": 1e3 / (statistics.median(ask_ms) + statistics.median(tell_ms)),
        "syncs_a_round": syncs[0] / ROUNDS,
    }
