"""The sweeps of a results directory: their state, one that is followed, one that is deleted."""
