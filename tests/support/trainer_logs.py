"""Lines of trainers' logs as templates: the formats that `workloads.formats.logs` reads."""

MEGATRON = (
    " [2026-04-28 14:23:45] iteration {n:8d}/     500 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | "
    "learning rate: 3.000000E-04 | global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | "
    "grad norm: 0.543 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
PRIMUS = (
    "[20251121 12:10:29][rank-31/32][INFO ] [--------trainer.py:2488] :  iteration {n:8d}/   36000 | "
    "consumed samples: {samples} | elapsed time per iteration (ms): {ms:.1f}/2712.7 | "
    "hip mem usage/free/total/usage_ratio: 227.35GB/28.63GB/255.98GB/88.81% | "
    "throughput per GPU (TFLOP/s/GPU): {tflops:.1f}/217.3 | tokens per GPU (tokens/s/GPU): 12130.4/12525.5 | "
    "global batch size:   256 | lm loss: {loss:.6E} | grad norm: 0.132 |"
)
NEMO = (
    "Training epoch 0, iteration {n}/499 | lr: 3e-05 | consumed_samples: {samples} | global_batch_size: 256 | "
    "global_step: {n} | reduced_train_loss: {loss:.4g} | train_step_timing in s: {s:.4g}"
)
TITAN = (
    "[rank{rank}]:[titan] 2026-05-18 16:{minute:02d}:{second:06.3f} - root - INFO - \x1b[31mstep: {n:2d}  "
    "\x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  0.8319  \x1b[38;2;54;234;195mmemory:  9.46GiB(64.99%)  "
    "\x1b[34mtps: {tps:,}  \x1b[36mtflops: {tflops:,.2f}  \x1b[35mmfu: 45.40%\x1b[39m"
)
