"""What a sweep does before it starts: the plan, the cost model and the measured matmul ceilings."""
