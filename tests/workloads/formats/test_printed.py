"""What trainers print of their configuration, in lines as they print them."""

from typing import Any

import pytest

from workloads.formats.printed import read_printed

TITAN = "[rank0]:[titan] 2025-12-17 01:18:19,500 - root - INFO - "


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        # Megatron-LM
        (
            "using world size: 8, data-parallel size: 2, context-parallel size: 1 tensor-model-parallel size: 4, "
            "pipeline-model-parallel size: 1",
            {"gpus": 8, "dp": 2, "cp": 1, "tp": 4, "pp": 1},
        ),
        ("  tensor_model_parallel_size ...................... 2", {"tp": 2}),
        ("  world_size ...................................... 64", {"gpus": 64}),
        ("  num_attention_heads ............................. 32", {"heads": 32}),
        ("  params_dtype .................................... torch.bfloat16", {"dtype": "bf16"}),
        ("  fp8 ............................................. None", {"fp8": "none"}),
        ("  fp8 ............................................. hybrid", {"fp8": "fp8"}),
        (" iteration 1/ 500 | consumed samples: 64 | global batch size:    64 | lm loss: 1.0 |", {"global_batch": 64}),
        # Primus
        ("[20251121 12:10:29][rank-31/32][INFO ] :   seq_length ......... 8192", {"gpus": 32, "sequence_length": 8192}),
        # Megatron-Bridge
        ("  pipeline_model_parallel_size: 4", {"pp": 4}),
        # NeMo
        ("[NeMo I nemo_logging:393] All tensor model parallel group ranks: [[0, 1], [2, 3]]", {"tp": 2}),
        ("All distributed processes registered. Starting with 8 processes", {"gpus": 8}),
        ("Using bfloat16 Automatic Mixed Precision (AMP)", {"dtype": "bf16"}),
        # torchtitan
        ('    "tensor_parallel_degree": 2,', {"tp": 2}),
        ('[rank0]:    "mixed_precision_param": "bfloat16",', {"dtype": "bf16"}),
        ('    "dtype": "float32",', {"weights_dtype": "fp32"}),
        (f"{TITAN}Mixed precision training is disabled", {"mixed_precision": "none"}),
        ('    "converters": [],', {"fp8": "none"}),
        ('    "flavor": "8B",', {"model_size": "8B"}),
        (
            f"{TITAN}Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, etp=1",
            {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2, "gpus": 8},
        ),
        (
            f"{TITAN}Training starts at step 1, with local batch size 1, global batch size 8, sequence length 2048",
            {"micro_batch": 1, "global_batch": 8, "sequence_length": 2048},
        ),
        (
            f"{TITAN}Trainer is initialized with local batch size 2, global batch size 16, gradient accumulation steps "
            "1, sequence length 8192, total steps 1000 (warmup 200)",
            {"micro_batch": 2, "global_batch": 16, "sequence_length": 8192},
        ),
        ('  "n_layers": 32,', {"layers": 32}),
        (f"{TITAN}MX training active with recipe mxfp8_cublas", {"fp8": "mxfp8"}),
        (
            f"{TITAN}\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m",
            {"model": "llama3_8B", "parameters": 8_030_261_248},
        ),
        (f"{TITAN}Float8 tensorwise scaled training active", {"fp8": "fp8_tensorwise"}),
        (f"{TITAN}Float8 training active with recipe rowwise_with_gw_hp", {"fp8": "fp8_rowwise_gw_hp"}),
        # DeepSpeed
        ("[INFO] [config.py:1000:print]   train_batch_size ............. 32", {"global_batch": 32}),
        ("[INFO] [config.py:1000:print]   train_micro_batch_size_per_gpu  2", {"micro_batch": 2}),
        ("[INFO] [config.py:1000:print]   bfloat16_enabled ............. True", {"dtype": "bf16"}),
        # Hugging Face's Trainer
        ("  Total train batch size (w. parallel, distributed & accumulation) = 1,024", {"global_batch": 1024}),
        # scripts
        (
            "config: dtype=torch.float16, model=llama3_1b, seq_len=512",
            {"dtype": "fp16", "model": "llama3_1b", "sequence_length": 512},
        ),
        ("step 3 | global_batch_size=64 | loss 2.5", {"global_batch": 64}),
        ("world_size=4 rank=0", {"gpus": 4}),
        ("Number of GPUs: 8", {"gpus": 8}),
    ],
)
def test_a_printed_configuration_is_read(line: str, printed: dict[str, Any]) -> None:
    assert read_printed(line) == printed


@pytest.mark.parametrize(
    "line",
    [
        "data parallel world size: 2",
        "max sequence length: 131072",
        '  "n_kv_heads": 8,',
        "  main_params_dtype ............... torch.float32",
        "  rampup_batch_size ............... [256, 256, 1000]",
        "  virtual_pipeline_model_parallel_size .... None",
        '    "global_batch_size": -1,',
        "[INFO] [config.py:1000:print]   world_size ................... 4",  # DeepSpeed's data-parallel size
        "per_device_train_batch_size: 4",
        "role_world_sizes=[8]",
        "expert_tensor_parallel_size ..... 1",
    ],
)
def test_other_sizes_and_types_are_not_taken_for_them(line: str) -> None:
    assert read_printed(line) == {}
