"""The checked plan of a sweep, its cost model and measured matmul ceilings."""
