import sweeper
from benchmarks.peers.table import run_trial


def trial(a, b):
    return run_trial(a, b)


if __name__ == "__main__":
    settings = ["search=grid", "cluster.max_concurrent_trials=4", "finals.top=0"]
    print(sweeper.run(*settings, workload=trial, space={"a": [*range(10)], "b": [*range(6)]}))
