"""Performance over time: reference results that a repository keeps, and later runs compared with them."""
