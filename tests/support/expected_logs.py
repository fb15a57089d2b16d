"""What a reader must make of each log, worked out by hand from its lines."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Expected:
    """One result of a log."""

    step_ms: float  # the median of the step times after the warm-up
    tokens_per_s: float | None = None  # of all devices; None where the lines do not have the tokens of a step
    devices: int | None = None
    mfu: float | None = None
    warmup: int = 0  # the timed steps that are left out
    claimed: float | None = None  # tokens/s of one device by the log, the median of the same steps
    memory_gib: float | None = None  # what the allocator reserved or the driver saw in use
    params: dict[str, Any] = field(default_factory=dict)  # some of the configuration
    contradiction: str = ""  # the beginning of the only message; empty for none


# Llama 3 8B at 8192 has 51.47 GFLOP a token and at 4096 48.24 (causal); an H100's dense bf16 peak is 989 TFLOP/s.
LLAMA_8B_AT_8192 = 32 * (6 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 6 * 8192 * 4096) + 6 * 4096 * 128256
LLAMA_8B_AT_4096 = 32 * (6 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 6 * 4096 * 4096) + 6 * 4096 * 128256
TITAN_8B = Expected(
    2800,  # (01:20:54 - 01:20:26) / 10 steps; before it 26 s / 9 steps = 2889 ms, no warm-up
    16 * 8192 / 2.8,  # 16 sequences, as configured or 2 x dp_shard 8: 46,811
    devices=8,  # pp 1 x dp_replicate 1 x dp_shard 8 x cp 1 x tp 1
    mfu=16 * 8192 / 2.8 / 8 * LLAMA_8B_AT_8192 / 989e12,  # 5,851 x 51.47e9 / 989e12 = 30.5%
    claimed=5851,
    memory_gib=60.0,
    params={"model": "llama3_8b", "sequence_length": 8192, "global_batch": 16, "dp_shard": 8},
)
WARMUP = "the time of one step, the first of the run: it is warm-up"
PROGRESS_BAR = "has a progress bar, whose time of a step is an average"
CHANGING_WORK = "the claimed tokens_per_s_per_gpu times the step time is"
NO_NUMBERS = "without the numbers of the steps"

# The logs of other people's trainers, by file name; a text is the reason of the refusal.
REFERENCE_LOGS: dict[str, str | tuple[Expected, ...]] = {
    # 53:42.562 to 54:04.065 is 21.503 s / 10, then 21.561 s / 10: their mean. 26.406 s / 9 = 2934 > 1.2 x 2153.
    "01_titan_2024-06_wps.log": (Expected(2153.2, warmup=1, claimed=(3812 + 3802) / 2, memory_gib=41.18),),
    # .511, .589, .667, .751, .848, .929: 78, 78, 84, 97, 81 ms
    "02_titan_2025-03.log": (Expected(81, claimed=203_673, memory_gib=1.41),),
    # 30:50.322, 31:04.970, 18.934, 32.895, 46.869, 32:00.846, each / 10: 1464.8, 1396.4, 1396.1, 1397.4, 1397.7
    "04_titan_2025-06_ckpt.log": (Expected(1397.4, claimed=5864, memory_gib=49.66),),
    "05_titan_2026-02_moe_8ranks.log": (Expected(1637, claimed=10_007, memory_gib=66.91),),  # 19.145 s - 17.508 s
    # 17.768, 20.545, 23.317, 26.101, 28.875: 2777, 2772, 2784, 2774, the mean of the middle two
    "07_titan_2026-02_xpu.log": (Expected(2775.5, claimed=(5902 + 5909) / 2, memory_gib=19.45),),
    # 13.122 s / 9 = 1458.0, 13.624 s / 10, 13.632 s / 10. 21,734 x 1.458 = 31,688 tokens, 21,511 x 1.3632 = 29,324.
    "08_titan_2026-01_notflops.log": (
        Expected(
            1363.2, claimed=21_734, memory_gib=48.91, contradiction="the claimed tokens_per_s_per_gpu times the st"
        ),
    ),
    # 5444.9, 5533.8, 5706.3, 5718.6, 5912.7, 5926.4: the mean of the middle two
    "10_megatron_2024-04_moe.log": (Expected((5706.3 + 5718.6) / 2),),
    "11_megatron_2023_epfl.log": (Expected((87_871.6 + 89_075.2) / 2),),  # 86545.2, 87871.6, 89075.2, 89474.8
    # Without 8195.9: 692.3, 699.0, 705.2, 717.1, 717.2, 719.8, 728.1, … of 11. 8 x 128 tokens.
    "12_megatron_2024-07_args.log": (Expected(719.8, 8 * 128 / 0.7198, devices=2, warmup=1),),
    # Without 1147.6 > 1.2 x 837.6: 820.7, 821.8, 837.6, 904.5. 1576.0 MiB reserved.
    "14_megatron_2025-04_eval.log": (Expected((821.8 + 837.6) / 2, warmup=1, memory_gib=1576 / 1024),),
    "15_megatron_2025-05_flagscale.log": WARMUP,
    # 4225.8, 4229.2, 4247.9; batch 8 x actual seqlen 2048. Their samples per second: 1.892 x 2048 = 3,875.
    "16_megads_2023.log": (Expected(4229.2, 8 * 2048 / 4.2292),),
    # "gloabl batch size" 512 x actual seqlen 2048. Their samples per second: 9.710 x 2048 = 19,886.
    "17_ascend_megatron.log": (Expected(52_728.1, 512 * 2048 / 52.7281),),
    "20_nemo2_bionemo_slurm.log": (Expected(190.3),),  # 0.189, 0.1903, 0.1915
    "21_nemo1_progressbar.log": PROGRESS_BAR,
    "22_primus_2025-11.log": (Expected(2701.3, devices=32, claimed=12_130.4, memory_gib=227.35),),
    "24_primus_2026-09_harmonic.log": (Expected(654.5, devices=8, warmup=1, claimed=25_032.8),),  # without 8146.7
    "25_bridge_2025-10.log": (Expected((13_212.7 + 14_260.3) / 2, memory_gib=12_954 / 1024),),
    "27_bridge_2026-09_args.log": (Expected(789.8, 8 * 8192 / 0.7898, devices=8),),
    "29_bridge_gb200_steponly.log": NO_NUMBERS,
    "30_megatron_rocm_memusages.log": (Expected(658.3),),
    "40_titan_full_noprefix.log": (TITAN_8B,),
    "41_titan_full_rank0prefix.log": (TITAN_8B,),
    "42_titan_full_gbs_default.log": (TITAN_8B,),
    "43_nemo_epochs.log": (Expected(2000, warmup=10),),  # ten steps of 10 s in epoch 0, forty of 2 s
    # Eight steps of 5 s with batch 256, four of 10 s with 512, sequences of 4096; 3,277 tokens/s a device.
    "44_megatron_rampup.log": (
        Expected(5000, 256 * 4096 / 5, devices=64, params={"global_batch": 256}),
        Expected(10_000, 512 * 4096 / 10, devices=64, params={"global_batch": 512}),
    ),
    # Eight steps of 5 s on 64 devices, then eighteen of 2.5 s on 128; batch 256, sequences of 4096.
    "45_megatron_restart.log": (
        Expected(5000, 256 * 4096 / 5, devices=64),
        Expected(2500, 256 * 4096 / 2.5, devices=128),
    ),
    "46_megatron_two_lines.log": (Expected(5000, 256 * 4096 / 5, devices=64, warmup=1),),  # without 60 s
}

MFU_OF_8 = 8 * 4096 / 0.7 / 8 * LLAMA_8B_AT_4096 / 989e12  # of 8 sequences: 28.5%
TITAN_SAMPLE = Expected(
    700,  # 7 s / 10 steps; before it 9 s / 9 steps, 1000 > 1.2 x 700
    8 * 4096 / 0.7,
    devices=8,  # dp_shard 4 x tp 2
    mfu=MFU_OF_8,
    warmup=1,
    claimed=5851,
    memory_gib=41.25,
    params={
        "model": "llama3_8b",
        "dtype": "bf16",
        "checkpointing": "full",
        "sharding": "fsdp2",
        "compile": False,
        "tp": 2,
    },
)
NEMO_SAMPLE = Expected(1600, warmup=5, claimed=64 * 2048 / 8 / 1.6, memory_gib=60.0)  # 64.4 GB of 10^9 bytes

# Our own samples in the formats of the programs, one for each format and each mistake that a reader can make.
SAMPLE_LOGS: dict[str, str | tuple[Expected, ...]] = {
    "titan.log": (TITAN_SAMPLE,),
    "titan_rank_prefix.log": (TITAN_SAMPLE,),  # torchrun's [rank0]: before each line
    # srun's " 0: " before each line; global_batch_size -1 is 1 sequence x dp_shard 4
    "titan_srun_prefix.log": (
        replace(TITAN_SAMPLE, tokens_per_s=4 * 4096 / 0.7, mfu=MFU_OF_8 / 2, claimed=2926, params={"global_batch": 4}),
    ),
    "titan_fp8.log": (Expected(700, 8 * 4096 / 0.7, devices=8, warmup=1, params={"dtype": "fp8"}),),
    "titan_2024.log": (Expected(2000, devices=8, warmup=1, claimed=2048, memory_gib=30.0),),  # wps; 30 s / 9, 20 s / 10
    "titan_ranks.log": (Expected(2000, claimed=8192),),  # three ranks print each step: 10.000, 12.000, 14.000
    "titan_inconsistent.log": (Expected(1000, claimed=4096, contradiction=CHANGING_WORK),),
    # 31000 is warm-up; 4100, 4000, 3990, 4010, 4000. The second rank reserved 57344 MiB.
    "megatron.log": (Expected(4000, 64 * 4096 / 4, devices=32, warmup=1, memory_gib=56.0, params={"dtype": "bf16"}),),
    "megatron_batch_rampup.log": (
        Expected(2000, 64 * 2048 / 2, devices=16, warmup=1, params={"global_batch": 64}),
        Expected(3800, 128 * 2048 / 3.8, devices=16, params={"global_batch": 128}),
    ),
    # 256 in the arguments, 64 in the steps, and no ramp-up
    "megatron_other_batch.log": (
        Expected(2000, 64 * 2048 / 2, devices=16, contradiction="the configuration has a global batch size of 256"),
    ),
    "megatron_restart.log": (
        Expected(8000, 64 * 2048 / 8, devices=8, warmup=1),
        Expected(4000, 64 * 2048 / 4, devices=16, warmup=1),
    ),
    "megatron_two_lines.log": (Expected(8000, 64 * 2048 / 8, devices=8, warmup=1),),
    "megatron_one_line.log": WARMUP,
    "megatron_skipped.log": (Expected(820),),  # 800, 820, 820, 900
    # The sequences grow from 1024 to 2048 tokens. DeepSpeed's world size, of its data parallel group, is not read.
    "megatron_deepspeed_curriculum.log": (
        Expected(2000, 16 * 1024 / 2, params={"sequence_length": 1024}),
        Expected(4000, 16 * 2048 / 4, params={"sequence_length": 2048}),
    ),
    "ascend_misspelt_batch.log": (Expected(6400, 128 * 2048 / 6.4),),
    "primus.log": (Expected(2000, 32 * 8192 / 2, devices=16, warmup=1, claimed=32 * 8192 / 2 / 16, memory_gib=120.5),),
    # 75.161928 GB of 10^9 bytes; 6000 > 1.2 x 3000
    "bridge.log": (Expected(3000, 32 * 8192 / 3, devices=8, warmup=1, memory_gib=70.0),),
    "bridge_without_numbers.log": NO_NUMBERS,
    # 2000, 1990, 2010, 2000, 2000 with three digits; 65,500 x 2 s / 64 = 2,047 tokens, nearest 16 x 128
    "nanotron.log": (Expected(2000, 64 * 2048 / 2, devices=8, claimed=8190, params={"sequence_length": 2048}),),
    "nanotron_2026.log": (Expected(2000, 131_000 / 2, devices=8, claimed=8190),),  # the batch is one of tokens
    "nanochat.log": (Expected(500, 262_144 / 0.5, warmup=1, params={"micro_batch": 16, "sequence_length": 2048}),),
    "gpt_neox.log": (Expected(3200, 64 * 2048 / 3.2, devices=16, warmup=1, params={"tp": 2, "global_batch": 64}),),
    # 2 s each by a clock of 1 s, from the validation's end on again; the tokens are the claimed 20,480 a second
    "nemo_automodel.log": (Expected(2000, 20_480, claimed=2560),),
    # 1 / 0.5; 524,288 tokens more a step, on 32,768 x 2 = 65,536 a device; step 1 has no time
    "olmo_core.log": (Expected(2000, 524_288 / 2, claimed=32_768, memory_gib=61.5),),
    "llm_foundry.log": (Expected(4000, 256 * 2048 / 4, devices=16, claimed=8192, params={"global_batch": 256}),),
    "deepspeed.log": (Expected(1600, params={"global_batch": 32}),),  # 32 / 20.0
    "deepspeed_pipeline.log": (Expected(800),),  # 900 < 1.2 x 800
    "primus_titan.log": (Expected(2000, devices=16, claimed=4096, memory_gib=120.25),),
    # The time is of all steps since the last line: 18000 / 9, 20000 / 10, 20020 / 10, 19990 / 10, 20000 / 10.
    "primus_titan_interval.log": (Expected(2000, devices=16, warmup=1, claimed=4096, memory_gib=120.25),),
    # DeepSpeed prints the same steps, and they count once.
    "megatron_deepspeed_seconds.log": (Expected(20_000, 256 * 2048 / 20, devices=64, warmup=1),),
    # 20, 10 s / 5 after the validation, 20 / 10, and a checkpoint of 45 s within 65 s: 2, 2, 2, 6.5, 2
    "titan_validation.log": (Expected(2000, claimed=4096),),
    "nemo_epochs.log": (NEMO_SAMPLE,),
    "nemo_epochs_without_global_step.log": (NEMO_SAMPLE,),
    "nemo_progress_bar.log": PROGRESS_BAR,
}
