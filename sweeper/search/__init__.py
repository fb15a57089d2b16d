"""Choose the next trial: Optuna's study, the budget and the finals."""
