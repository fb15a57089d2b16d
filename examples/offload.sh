#!/bin/sh
# Train within budgets of device and host memory: what does a smaller budget cost in speed?
set -e

# On paper, without a GPU: Llama 3 8B on one H200. Without plan=true, a machine with an H200 measures it.
python -m sweeper name=offload8b workload=llama8b hardware=h200 search=grid plan=true \
    space.device_gib=24,40,78 space.host_gib=75,100

# Measured on this CPU: a tiny Llama within four budgets.
python -m sweeper name=offload workload=llama_tiny hardware=cpu search=grid \
    space.device_gib=0.013,0.02 space.host_gib=0,0.1
