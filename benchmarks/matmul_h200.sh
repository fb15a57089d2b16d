#!/usr/bin/env bash
# The main job on a GPU machine from nothing: 200 trials, what it printed, and every trial.
# Usage: benchmarks/matmul_h200.sh OUT_FOLDER
set -euo pipefail
repository=$(realpath "$(dirname "$0")/..")
out=$(realpath "$1")
work=$(mktemp -d)
cd "$work"
export PYTHONPATH="$repository:${PYTHONPATH:-}"
{
  nvidia-smi --query-gpu=name,driver_version,power.limit,temperature.gpu,clocks.sm --format=csv
  python3 -c 'import platform, torch, ray, optuna, mlflow; print("Python", platform.python_version(), "torch", torch.__version__, "ray", ray.__version__, "optuna", optuna.__version__, "mlflow", mlflow.__version__)'
  echo "\$ python3 -m sweeper workload=matmul budget.trials=200"
  SECONDS=0
  python3 -m sweeper workload=matmul budget.trials=200
  echo "wall $SECONDS s"
  echo "\$ python3 -m sweeper search=grid space.m=8192 space.n=8192 space.k=8192 space.sustained_s=3"
  python3 -m sweeper search=grid space.m=8192 space.n=8192 space.k=8192 space.sustained_s=3
  nvidia-smi --query-gpu=temperature.gpu,clocks.sm,power.draw --format=csv
} 2>&1 | tee "$out/matmul_h200.txt"
cp sweeps/*tpe*/trials.csv "$out/matmul_h200.csv"
