"""List the sweeps in a results directory, follow a sweep, or delete a sweep."""
