"""The checked plan of a sweep, its cost model and the measured matmul ceilings."""
