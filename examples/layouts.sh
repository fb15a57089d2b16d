#!/bin/sh
# Train a tiny Llama over two processes, in the parallel layouts that the planner expects to be the fastest.
set -e

# Every layout that the rules exclude has a reason in sweeps/layouts/plan.csv.
python -m sweeper name=layouts workload=parallel model=llama_tiny hardware=cpu gpus=2 plan=true

python -m sweeper name=layouts workload=parallel model=llama_tiny hardware=cpu gpus=2 budget.trials=4 finals.top=0
