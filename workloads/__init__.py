"""What a trial does. Knows torch; never imports Ray, Optuna, MLflow, Hydra or `sweeper`."""
