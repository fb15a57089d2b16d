"""The names that trainers print, this project's names for them, and the colours around them."""

from __future__ import annotations

import re

GIB = 2**30

# The printed name of a metric: its name in this project, and the factor to this project's unit.
METRICS = {
    "elapsed time per iteration (ms)": ("step_time_s", 1e-3),
    "train_step_timing in s": ("step_time_s", 1.0),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops_per_gpu", 1.0),
    "compute per GPU (TFLOP/s/GPU)": ("tflops_per_gpu", 1.0),
    "TFLOPS_per_GPU": ("tflops_per_gpu", 1.0),
    "TFLOPs": ("tflops_per_gpu", 1.0),  # Megatron-DeepSpeed: of one GPU too
    "tflops": ("tflops_per_gpu", 1.0),
    "tokens per GPU (tokens/s/GPU)": ("tokens_per_s_per_gpu", 1.0),
    "tokens/s/GPU inst/harmonic mean": ("tokens_per_s_per_gpu", 1.0),
    "tokens/sec/GPU": ("tokens_per_s_per_gpu", 1.0),
    "tokens_per_sec_per_gpu": ("tokens_per_s_per_gpu", 1.0),
    "tps": ("tokens_per_s_per_gpu", 1.0),
    "wps": ("tokens_per_s_per_gpu", 1.0),  # torchtitan of 2024: words are tokens, of one GPU
    "mfu": ("mfu", 0.01),
    "global batch size": ("global_batch", 1.0),
    "gloabl batch size": ("global_batch", 1.0),  # as Megatron's port for Ascend spells it
    "global_batch_size": ("global_batch", 1.0),
    "actual seqlen": ("sequence_length", 1.0),
    "number of skipped iterations": ("skipped_iterations", 1.0),
    "lm loss": ("loss", 1.0),
    "reduced_train_loss": ("loss", 1.0),
    "loss": ("loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    # What the allocator reserved, or what the driver saw in use; Primus writes GB and means GiB.
    "memory": ("peak_device_gib", 1.0),
    "hip mem usage/free/total/usage_ratio": ("peak_device_gib", 1.0),
    "rocm mem usage/free/total/usage_ratio": ("peak_device_gib", 1.0),
    "peak_memory_usage": ("peak_device_gib", 1 / GIB),
    "mem usages": ("device_memory_share", 1.0),
}
STEP_SIZES = ("global_batch", "sequence_length")  # the sizes of a step, which are no results

# Names in a line about a rank's memory. Megatron's MB are MiB; the other line has GB of 10^9 bytes.
MEMORY = {
    "max allocated": ("peak_memory_gib", 1 / 1024),
    "max reserved": ("peak_device_gib", 1 / 1024),
    "mem-max-allocated-gigabytes": ("peak_memory_gib", 1e9 / GIB),
    "mem-max-reserved-gigabytes": ("peak_device_gib", 1e9 / GIB),
}

# The programs' names of their configuration, and ours. torchtitan's names have the section before them.
CONFIG = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "data_parallel_size": "dp",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "rampup_batch_size": "batch_rampup",
    "seq_length": "sequence_length",
    "world_size": "gpus",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.data_parallel_shard_degree": "dp_shard",
    "parallelism.data_parallel_replicate_degree": "dp_replicate",
    "training.local_batch_size": "micro_batch",
    "training.batch_size": "micro_batch",
    "training.global_batch_size": "global_batch",
    "training.seq_len": "sequence_length",
    "activation_checkpoint.mode": "checkpointing",
    "compile.enable": "compile",
}
DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
    "16bit": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
    "32-true": "fp32",
}

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def strip_colours(line: str) -> str:
    """Return a line without the escape sequences by which a terminal changes colours."""
    return _COLOUR.sub("", line)
