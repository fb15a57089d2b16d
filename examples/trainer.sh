#!/bin/sh
# Search two flags of your own trainer for the lowest loss after its 60 steps. The trainer is a program that prints a rate,
# such as `step 10 loss 2.3 | 1234 tok/s`; it needs no change. Without objective= the fastest wins.
set -e
train=$(dirname "$0")/train.py

# Run the first point for a few steps, and show what is read from its output.
python -m sweeper name=trainer workload=command hardware=cpu search=grid plan=run \
    "command.run='python $train --lr={lr} --batch={batch}'" space.lr=0.1,0.5 space.batch=256,1024

python -m sweeper name=trainer workload=command hardware=cpu search=grid \
    "command.run='python $train --lr={lr} --batch={batch}'" space.lr=0.1,0.5 space.batch=256,1024 \
    objective=loss command.steps=60
