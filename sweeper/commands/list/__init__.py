"""List the sweeps of a results directory, follow a sweep, or delete one."""
