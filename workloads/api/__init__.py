"""Everything that crosses between `sweeper/` and `workloads/`; imports the standard library only."""
