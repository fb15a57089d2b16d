"""How a sweep runs. Knows Ray, Optuna, MLflow and Hydra; never imports torch."""
