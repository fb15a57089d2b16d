"""The workloads that trials run. May import torch; never imports Ray, Optuna, MLflow, Hydra or `sweeper`."""
