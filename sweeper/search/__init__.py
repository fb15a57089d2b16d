"""Choose the next trial with Optuna, keep to the budget, and run the finals."""
