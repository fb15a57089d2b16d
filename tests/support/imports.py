"""Files of other tools, made for a test."""

from typing import Any

from sweeper.commands.ingest.readers import COLUMNS

TOKENS_PER_S = 68 * 8192 / 50  # of a line of `ml_dataflow_line`: 68 sequences of 8192 tokens in 50 s
# Llama 3 8B at 8192 tokens: L(6D(2D + 2K + 3F) + 6SD) + 6DV
TFLOPS = TOKENS_PER_S * (32 * (6 * 4096 * (8192 + 2048 + 43008) + 6 * 8192 * 4096) + 6 * 4096 * 128256) / 1e12


def tprimat_benchmark(**changes: Any) -> dict[str, Any]:
    """Return a tprimat benchmark of the newer schema: 64 sequences of 2048 tokens in 2 s, after 20 and 4 s."""
    content: dict[str, Any] = {
        "platform": "nvd",
        "gpu_info": {"device_count": 8, "device_name": "NVIDIA H100 80GB HBM3"},
        "parallelism_config": {
            "strategy_name": "balanced",
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "data_parallel_size": 4,
        },
        "training_config": {
            "global_batch_size": 64,
            "sequence_length": 2048,
            "num_gpus": 8,
            "parallel_strategy": "balanced",
        },
        "performance_metrics": {"total_steps": 32, "avg_step_time_seconds": 64 / 31, "tokens_per_second": 63488.0},
        "step_times": [20.0, 4.0, *[2.0] * 30],
    }
    return content | changes


def ml_dataflow_line(**changes: float) -> dict[str, float]:
    """Return a line of ml_dataflow's results by column: Llama 3 8B, 68 sequences of 8192 tokens in 50 s on an H100."""
    values = dict.fromkeys(COLUMNS, 1.0) | {"sequence_length": 8192, "sequences_per_step": 68, "step_s": 50.0}
    values |= {"model_b": 8, "host_gib": 64, "device_gib": 40, "used_host_gib": 60.5, "used_device_gib": 38.25}
    return values | {"tokens_per_s": TOKENS_PER_S, "tflops": TFLOPS, "mfu": TFLOPS / 989} | changes


def ml_dataflow_csv(*changes: dict[str, float], columns: list[str] = COLUMNS) -> str:
    """Return ml_dataflow's results with a line for each set of changes."""
    rows = [ml_dataflow_line(**change) for change in changes]
    return "".join(",".join(str(row[name]) for name in columns) + "\n" for row in rows)
