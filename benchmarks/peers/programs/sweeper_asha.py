import sweeper
from benchmarks.peers.table import run_trial


def trial(a, b, report):
    return run_trial(a, b, report)


if __name__ == "__main__":
    asha = ["search.pruner=asha", "search.min_steps=1", "search.reduction_factor=4"]  # Ray Tune's defaults
    settings = ["search=grid", *asha, "cluster.max_concurrent_trials=4", "finals.top=0"]
    print(sweeper.run(*settings, workload=trial, space={"a": [*range(10)], "b": [*range(6)]}))
