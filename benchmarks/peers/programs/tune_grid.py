from pathlib import Path

from ray import tune

from benchmarks.peers.table import run_trial


def trial(config):
    tune.report({"score": run_trial(config["a"], config["b"])})


folder = str(Path("tune").resolve())
if tune.Tuner.can_restore(folder):
    tuner = tune.Tuner.restore(folder, trial, resume_errored=True)
else:
    tuner = tune.Tuner(
        trial,
        param_space={"a": tune.grid_search([*range(10)]), "b": tune.grid_search([*range(6)])},
        tune_config=tune.TuneConfig(metric="score", mode="max", reuse_actors=True),
        run_config=tune.RunConfig(name="tune", storage_path=str(Path.cwd())),
    )
tuner.fit().get_dataframe().to_csv("results.csv")
