#!/usr/bin/env bash
# The checks that only a node with AMD GPUs can answer, in under 15 minutes:
#
#     launch/amd/bring_up.sh [--dry-run] [FOLDER]
#
# It needs idle GPUs and an environment with the project (docs/guides/amd.md). Each check is one command, ends within its bound,
# and ends nothing but itself when it fails. At the end there is a table of pass and fail against the published figures
# of anchors.csv, and one file to send back, in which secrets, host names, serial numbers and addresses are masked.
# --dry-run prints the name, the bound in seconds and the command of each check.
set -uo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
KFD=${KFD:-/dev/kfd} # ROCm's device; another path for tests
GRACE_S=20           # from SIGTERM to SIGKILL: a sweep lets its trials finish for trial.grace_s=10

dry_run=""
if [ "${1:-}" = --dry-run ]; then
  dry_run=yes
  shift
fi
folder=${1:-bring_up-$(date +%Y%m%d-%H%M%S)}

# check NAME BOUND_S COMMAND…: run one check, and note its exit code and duration in checks.tsv.
check() {
  local name=$1 bound_s=$2 code=0 started=$SECONDS
  shift 2
  if [ -n "$dry_run" ]; then
    printf '%s\t%s\t%s\n' "$name" "$bound_s" "$(printf '%q ' "$@")"
    return
  fi
  echo "bring_up: $name, at most $bound_s s" >&2
  timeout --kill-after="$GRACE_S" "$bound_s" "$@" >"$folder/$name.out" 2>"$folder/$name.err" || code=$?
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - started))" >>"$folder/checks.tsv"
}

if [ -z "$dry_run" ]; then
  if [ ! -e "$KFD" ]; then
    echo "bring_up: there is no $KFD: this machine has no AMD GPU, or the container was started without --device=$KFD" >&2
    exit 2
  fi
  mkdir "$folder" || exit 2 # an older folder would be mixed with this one
fi

sweep=(python -m sweeper hardware=auto search=grid finals.top=0 progress=json dir="$folder/runs")
product=("${sweep[@]}" workload=matmul space.warmup=10 space.repeats=100)
allreduce=("${sweep[@]}" workload=collectives space.collective=all_reduce space.kib=1048576)
offload=("${sweep[@]}" workload=llama1b space.device_gib=8 space.host_gib=24 space.sequences_per_step=8 space.steps=2)
fsdp8=("${sweep[@]}" workload=parallel model=llama3_8b gpus=8 space.sequence_length=8192 space.global_batch=8
  space.dp_replicate=1 space.dp_shard=8 space.tp=1 space.cp=1 space.pp=1 space.stages_per_rank=1 space.schedule=1f1b
  space.micro_batch=1 space.checkpointing=selective space.reshard_after_forward=true space.dtype=bf16)

check record 40 python -m sweeper doctor record "$folder/machine.json"
check doctor 90 python -m sweeper doctor dir="$folder"
# Partitions and power caps are in both. The published products, for the libraries and clocks:
check product_cold 40 "${product[@]}" space.dtype=bf16 space.m=10240 space.n=15360 space.k=8192 space.statistic=mean_cold
check product_warm 40 "${product[@]}" space.dtype=bf16 space.m=4352 space.n=13568 space.k=3840 space.statistic=fastest_warm
# A product that only reads its weights, 201 MB: cold, it must not be faster than the memory behind the 256 MiB cache.
check cache_cold 40 "${product[@]}" space.dtype=bf16 space.m=16 space.n=12288 space.k=8192 space.statistic=median_cold
check cache_warm 40 "${product[@]}" space.dtype=bf16 space.m=16 space.n=12288 space.k=8192 space.statistic=median_warm
check tf32 40 "${product[@]}" space.dtype=tf32 space.m=4096 space.n=4096 space.k=4096 space.statistic=median_cold
check timing 40 python "$HERE/timing_cost.py"
for queues in 2 4 8; do
  check "offload_queues_$queues" 60 "${offload[@]}" space.env.GPU_MAX_HW_QUEUES="$queues"
done
for gpus in 2 4 8; do
  check "allreduce_$gpus" 40 "${allreduce[@]}" gpus="$gpus"
done
check fsdp8 220 "${fsdp8[@]}" space.steps=5

[ -n "$dry_run" ] && exit
python "$HERE/verdict.py" "$folder"
code=$?
tar -czf "$folder.tar.gz" -C "$folder" masked
echo "bring_up: send back $folder.tar.gz" >&2
exit "$code"
