"""Performance over time: reference figures that a repository keeps, and later runs against them."""
