"""Which trial comes next: Optuna's study, the budget and the finals."""
