#!/bin/sh
# Search matrix products for the fastest one, measure the best three again, and write the report.
set -e

python -m sweeper name=matmul hardware=cpu space.dtype=fp32 space.k=512 \
    'space.m=choice(256,512,1024)' 'space.n=choice(256,512,1024)' budget.trials=8 finals.rounds=3

# One HTML file of all sweeps in ./mlflow.db, without links to the network.
python -m sweeper report out=matmul.html
