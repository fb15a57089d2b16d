"""Check and plan a sweep, using a cost model and measured matmul ceilings."""
