#!/bin/sh
# Plan a training on a cluster that you do not have, for the model of a Hugging Face config.json.
set -e
model=$(dirname "$0")/config.json

# The fastest layouts on 64 H100s as torchtitan runs them, with the band of each estimate.
python -m sweeper plan model="$model" hardware=h100 gpus=64 trainer=torchtitan out=plan.html

# The same layout as a file that Megatron-LM runs.
python -m sweeper plan model="$model" hardware=h100 gpus=64 file=megatron

# GPUs, days and energy for a trillion tokens.
python -m sweeper plan model="$model" hardware=h100,h200,mi300x gpus=64 train_tokens=1e12
