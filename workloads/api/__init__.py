"""The interface between `sweeper/` and `workloads/`. Its modules import only the standard library at module level."""
