"""Check and plan a sweep, with a cost model and measured matmul ceilings."""
