"""The workloads that trials run. They may import torch, but never Ray, Optuna, MLflow, Hydra or `sweeper`."""
