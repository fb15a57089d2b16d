"""The interface between `sweeper/` and `workloads/`. At module level it imports the standard library only."""
