#!/bin/sh
# Stop a merge that makes a program slower: reference figures in performance.json, and later sweeps compared with them.
# The exit code of `history` is the verdict: 0 not slower, 1 slower, 3 inconclusive (more runs are needed).
set -e
train=$(dirname "$0")/train.py

sweep() {
    python -m sweeper name="$1" workload=command hardware=cpu \
        "command.run='python $train --lr={lr} --batch={batch}'" space.lr=0.5 space.batch=1024
}

# On the main branch: measure, and commit performance.json.
sweep main
python -m sweeper history append main

# On a branch whose steps take 20 ms longer.
export PAUSE_S=0.02
sweep branch
verdict=0
python -m sweeper history branch junit=gate.xml markdown=gate.md || verdict=$?

echo "history ended with $verdict: a pipeline fails with 1, and measures again with 3"
test "$verdict" = 1
