"""Compare torchtitan 0.2.2 with this project's trainer on two or four GPUs, from the same weights and tokens.

    python benchmarks/trainers.py [--rows "cp 2, full" …] [--sequences 4] [--rounds 1] [--out FILE.jsonl] [--plan]

Each row of `ROWS` is a compiled layout on two or four GPUs, the product of its degrees, with `--sequences` sequences
per step and GPU, over `--steps` steps after two warm-up steps. Dense layouts without tensor and context parallelism
have this project's manual block. The trainers are interleaved: each turn starts the processes of both anew, and every
second turn swaps their order.
`workload=parallel` runs through `run_trial`; for torchtitan, `Trainer.train_step` is timed, with the tokens drawn
before. Weights, gradients and optimizer states are in fp32 and GEMMs in bf16, or all are in bf16. Where nothing is
sharded (only tensor or pipeline parallelism), torchtitan has no mixed precision.

Both trainers also share the initial weights, copied into torchtitan's model from the same generator; AdamW with a
constant learning rate and clipping (none with bf16 states); the attention kernel, the fastest on this GPU; and the
experts of each token. They differ in what `selective` saves (torchtitan: every second GEMM of each block; this project:
all but the widest GEMM, or in every second block), the loss (torchtitan stores a micro-batch's logits), and when FSDP
gathers and reduces between micro-batches.

The script prints the median step's tokens/s, memory and losses of both trainers, and then the required relations. A
trainer that fails has no values, and its error is on stderr. `--plan` prints the rows and runs nothing.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.api.contract import Rank
from workloads.models.model import Model
from workloads.parallel import ParallelParameters

WARMUP, TIMEOUT_S = 2, 300
ORDER_MARGIN, RATE_MARGIN, MEMORY_MARGIN, LOSS_MARGIN = 0.03, 0.05, 0.05, 0.02
# This rate is low because there is no warm-up: at 1e-4, the losses of 8B rise in both trainers before they fall.
LEARNING_RATE = 1e-5
DENSE = {"model": "llama3_8b", "sequence_length": 8192}
SPARSE = {"model": "qwen3_30b_a3b", "layers": 8, "sequence_length": 4096, "micro_batch": 2, "imbalance": 1.0}
BF16, MANUAL = {"state": "bf16"}, {"block": "manual"}
SHARDED = {"dp_shard": 2} | MANUAL
SELECTIVE, FULL = {"checkpointing": "selective"}, {"checkpointing": "full"}
SELECTIVE_UP = {"checkpointing": "selective_up"}
# Parameters of `workload=parallel`. In fp32, the states of 8B take 120 GiB on each GPU if nothing is sharded.
ROWS: dict[str, dict[str, Any]] = {
    "dp_shard 2": DENSE | SHARDED,
    "dp_shard 2, weights stay gathered": DENSE | SHARDED | {"reshard_after_forward": False},
    "dp_shard 2, bf16 state": DENSE | SHARDED | BF16,
    "dp_shard 2, bf16 state, weights stay gathered": DENSE | SHARDED | BF16 | {"reshard_after_forward": False},
    "dp_replicate 2": DENSE | {"dp_replicate": 2} | MANUAL | BF16,
    "dp_replicate 2, full": DENSE | {"dp_replicate": 2} | MANUAL | BF16 | FULL,
    "tp 2": DENSE | {"tp": 2} | BF16,
    "pp 2": DENSE | {"pp": 2} | MANUAL | BF16,
    "cp 2": DENSE | {"cp": 2},
    "dp_shard 2, selective": DENSE | SHARDED | SELECTIVE,
    "dp_shard 2, selective_up": DENSE | SHARDED | SELECTIVE_UP,
    "dp_shard 2, full": DENSE | SHARDED | FULL,
    "cp 2, selective": DENSE | {"cp": 2} | SELECTIVE,
    "cp 2, selective_up": DENSE | {"cp": 2} | SELECTIVE_UP,
    "cp 2, selective in every second block": DENSE | {"cp": 2} | SELECTIVE | {"checkpointing_freq": 2},
    "cp 2, full": DENSE | {"cp": 2} | FULL,
    "dp_shard 4": DENSE | SHARDED | {"dp_shard": 4},
    "dp_shard 2, tp 2": DENSE | {"dp_shard": 2, "tp": 2},
    "dp_shard 2, cp 2": DENSE | {"dp_shard": 2, "cp": 2},
    "ep 2": SPARSE | {"dp_shard": 2, "ep": 2, "reshard_after_forward": False} | BF16,
}
# torchtitan's names for the degrees.
DEGREES = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "tp": "tensor_parallel"}
DEGREES |= {"cp": "context_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
TRAINERS = ("parallel", "torchtitan")
MARK = "result "  # precedes a rank's result


@dataclass(frozen=True)
class Result:
    """The measurements of one trial: over all GPUs, and on the GPU that needs the most memory."""

    tokens_per_s: float = math.nan  # of the median step
    allocated_gib: float = math.nan
    reserved_gib: float = math.nan
    first_loss: float = math.nan
    loss: float = math.nan  # after the last step
    attention: str = ""
    step_times_s: list[float] = field(default_factory=list)


def gpus_of(values: dict[str, Any]) -> int:
    return math.prod(values.get(degree, 1) for degree in DEGREES if degree != "ep")


def make_text(folder: Path, vocabulary: int, documents: int = 60) -> None:
    """Write a tokenizer of whole words, and documents of random words with the token ids of `workload=parallel`."""
    from workloads.parallel.train import TokenSource

    names = ["[UNK]", "<begin>", "<end>", *(f"word{number}" for number in range(3, vocabulary))]
    assets, texts = folder / "assets", folder / "text"
    assets.mkdir(parents=True)
    texts.mkdir()
    model = {"type": "WordLevel", "vocab": {name: id_ for id_, name in enumerate(names)}, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (assets / "tokenizer.json").write_text(json.dumps(tokenizer))
    (assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<begin>", "eos_token": "<end>"}))
    source, words = TokenSource(vocabulary, 8192, seed=0), np.array(names)
    with (texts / "data.json").open("w") as file:
        for step in range(documents):
            file.write(json.dumps({"text": " ".join(words[source.draw(step, [0]).tokens[0].numpy()])}) + "\n")


def train_parallel(values: dict[str, Any], rank: Rank) -> Result:
    from workloads.api.trial import run_trial

    measured = run_trial("parallel", values, rank)
    metrics, times_s = measured.metrics, list(measured.step_times_s)
    rate = measured.tokens_per_step / statistics.median(times_s)
    allocated, reserved = (metrics.get(name, math.nan) for name in ("peak_device_gib", "peak_reserved_gib"))
    kernel = str(measured.machine_info["attention"])
    return Result(rate, allocated, reserved, metrics["first_loss"], metrics["loss"], kernel, times_s)


def train_torchtitan(parameters: ParallelParameters, rank: Rank) -> Result:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from workloads.instruments import process_setup
    from workloads.instruments.device import device_of
    from workloads.parallel.stage import build_initializer

    device = device_of(rank)
    process_setup.keep_compiled_kernels()
    process_setup.enable_expandable_segments(device)  # as in torchtitan's run_train.sh
    train = import_torchtitan()
    with attention_of_parallel(parameters, device) as kernel:
        trainer = train.Trainer(configure(parameters))
        initialize = build_initializer(parameters.seed, device)
        for model in trainer.model_parts:
            copy_weights(model, parameters, initialize)
            # torchtitan scales FSDP's reductions by 1.0. PyTorch 2.11 passes this factor to NCCL as fp32. For bf16,
            # NCCL reads two bytes, which are zero, so all reduced gradients are zero. A plain sum is the same.
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        losses: list[float] = []
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        if parameters.state == "bf16":
            train.dist_utils.clip_grad_norm_ = lambda *_, **__: torch.zeros(())
        batches, times_s = trainer.batch_generator(trainer.dataloader), []
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUP + parameters.steps):
            dist.barrier()
            started = time.perf_counter()
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)
            synchronize()
            times_s.append(time.perf_counter() - started)
    peaks = torch.full((2,), math.nan, device=device)
    if device.type == "cuda":
        bytes_ = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        peaks = torch.tensor(bytes_, device=device) / 2**30
    last = torch.tensor(losses, device=device)  # a pipeline's first ranks have no loss: -1 in torchtitan
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    timed = times_s[WARMUP:]
    rate = parameters.global_batch * parameters.sequence_length / statistics.median(timed)
    dist.destroy_process_group()
    return Result(rate, float(peaks[0]), float(peaks[1]), float(last[0]), float(last[-1]), kernel, timed)


def import_torchtitan() -> Any:
    """Return `torchtitan.train`, imported without packages for data and logs, which are unused here."""
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules.setdefault(name, UnusedModule(name))
    return importlib.import_module("torchtitan.train")


class UnusedModule(ModuleType):
    """A stand-in for a package that torchtitan imports and this comparison never calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def attention_of_parallel(parameters: ParallelParameters, device: Any) -> Iterator[str]:
    """Make torchtitan use the attention kernel of `workload=parallel`, and yield the kernel's name."""
    import torch
    from torch.nn.attention import SDPBackend
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from workloads.llama.attention import AttentionShape
    from workloads.llama.pytorch_attention import fastest_attention

    length = parameters.sequence_length // (2 * parameters.cp if parameters.cp > 1 else 1)
    shape = AttentionShape.of_model(parameters.shape, length, torch.bfloat16, parameters.tp)
    with fastest_attention(shape, device) as kernel:
        is_flash = "flash" in kernel
        backends = [SDPBackend.FLASH_ATTENTION if is_flash else SDPBackend.CUDNN_ATTENTION]
        ScaledDotProductAttentionWrapper.sdpa_backends = backends if device.type == "cuda" else [SDPBackend.MATH]
        yield kernel


def configure(parameters: ParallelParameters) -> Any:
    """Return torchtitan's configuration of a layout, with a model and tokens that are registered under its name."""
    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    from workloads.parallel.train import TokenSource

    config, steps = JobConfig(), WARMUP + parameters.steps
    config.model.name, config.model.flavor, config.job.dump_folder = "row", "row", tempfile.gettempdir()
    config.training.seq_len, config.training.steps = parameters.sequence_length, steps
    config.training.global_batch_size = parameters.global_batch
    # The batch that goes through a pipeline at once, in micro-batches of one.
    config.training.local_batch_size = parameters.global_batch if parameters.pp > 1 else parameters.micro_batch
    config.training.dtype = "float32" if parameters.state == "fp32" else "bfloat16"
    config.training.mixed_precision_reduce = config.training.dtype
    for name, degree in DEGREES.items():
        setattr(config.parallelism, f"{degree}_degree", getattr(parameters, name))
    config.parallelism.fsdp_reshard_after_forward = "default" if parameters.reshard_after_forward else "never"
    config.activation_checkpoint.mode = parameters.checkpointing.removesuffix("_up")
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable = parameters.compile
    config.optimizer.lr, config.lr_scheduler.warmup_steps = parameters.learning_rate, 0
    config.lr_scheduler.total_steps = 10**6  # the rate decays over these steps, so it is constant here
    config.metrics.log_freq = 1
    config.debug.moe_force_load_balance = parameters.imbalance is not None

    def draw(dp_world_size: int, dp_rank: int, **_: Any) -> list[Any]:
        source = TokenSource(parameters.shape.vocabulary, parameters.sequence_length, parameters.seed)
        count = parameters.global_batch // dp_world_size
        tokens = [source.draw(step, range(dp_rank * count, (dp_rank + 1) * count)).tokens for step in range(steps)]
        parts = [part for drawn in tokens for part in drawn.split(config.training.local_batch_size)]
        return [({"input": part[:, :-1].contiguous()}, part[:, 1:].contiguous()) for part in parts]

    spec = get_train_spec("qwen3" if parameters.shape.experts else "llama3")
    arguments = {"row": (experts_arguments if parameters.shape.experts else dense_arguments)(parameters.shape)}
    register_train_spec("row", replace(spec, model_args=arguments, build_tokenizer_fn=None, build_dataloader_fn=draw))
    return config


def dense_arguments(shape: Model) -> Any:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    sizes = {"dim": shape.hidden_size, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.kv_heads}
    sizes |= {"vocab_size": shape.vocabulary, "multiple_of": shape.intermediate_size, "ffn_dim_multiplier": 0.1}
    scaling = RoPEScalingArgs(scaling_factor=1.0)  # Llama 3.1's scaling does not apply to Llama 3
    return TransformerModelArgs(
        **sizes, norm_eps=shape.norm_eps, rope_theta=shape.rope_theta, rope_scaling_args=scaling
    )


def experts_arguments(shape: Model) -> Any:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    router = {"score_func": "softmax", "route_norm": shape.renormalized, "route_scale": shape.router_scale}
    router |= {"top_k": shape.experts_per_token, "score_before_experts": False, "load_balance_coeff": None}
    experts = MoEArgs(num_experts=shape.experts, num_shared_experts=0, **router)
    sizes = {"dim": shape.hidden_size, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.kv_heads}
    sizes |= {"vocab_size": shape.vocabulary, "head_dim": shape.head_size}
    sizes |= {"moe_inter_dim": shape.expert_intermediate_size, "moe_enabled": True, "moe_args": experts}
    return Qwen3ModelArgs(**sizes, norm_eps=shape.norm_eps, rope_theta=shape.rope_theta)


def copy_weights(model: Any, parameters: ParallelParameters, initialize: Any) -> None:
    """Give torchtitan's model the initial weights of `workload=parallel`, and its routers the same token assignment."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.models.moe.moe import TokenChoiceTopKRouter

    from workloads.llama.experts import force_experts

    shape = parameters.shape
    for name, weight in model.named_parameters():
        path = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        whole = first_weight(path, shape, initialize).to(weight.dtype)
        with torch.no_grad():
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
                weight.to_local().copy_(whole)
            else:
                weight.copy_(whole)

    def choose(router: Any, scores: Any) -> tuple[Any, Any]:
        return router.forced, scores.gather(1, router.forced)

    if parameters.imbalance is not None:
        tokens = parameters.micro_batch * parameters.sequence_length // parameters.cp
        TokenChoiceTopKRouter._debug_force_load_balance_routing = choose
        routers = [module for module in model.modules() if isinstance(module, TokenChoiceTopKRouter)]
        for layer, router in enumerate(routers):
            forced = force_experts(tokens, shape, parameters.imbalance, parameters.seed + layer)
            router.forced = forced.to(next(model.parameters()).device)


def first_weight(path: str, shape: Model, initialize: Any) -> Any:
    """Return the initial value of torchtitan's weight of this name; our matrices combine several of torchtitan's."""
    hidden, keys = shape.hidden_size, shape.kv_heads * shape.head_size
    if "norm" in path:
        return initialize(path, (shape.head_size if path.split(".")[-2] in ("q_norm", "k_norm") else hidden,))
    if path in ("tok_embeddings.weight", "output.weight"):
        ours = "embedding.weight" if path == "tok_embeddings.weight" else "lm_head.weight"
        return initialize(ours, (shape.vocabulary, hidden))
    _, layer, *_, matrix = (part for part in path.split(".") if part != "weight")
    block, queries = f"blocks.{layer}", shape.heads * shape.head_size
    if matrix in ("wq", "wk", "wv"):
        qkv = initialize(f"{block}.qkv.weight", (queries + 2 * keys, hidden))
        rows = qkv.split([queries, keys, keys])[("wq", "wk", "wv").index(matrix)]
        if matrix == "wv" or shape.experts:
            return rows
        # torchtitan's llama3 rotates neighboring features, and this trainer pairs features across the halves of a head.
        return rows.view(-1, 2, shape.head_size // 2, hidden).transpose(1, 2).reshape(rows.shape)
    if matrix == "wo":
        return initialize(f"{block}.output.weight", (hidden, queries))
    if matrix == "gate":
        return initialize(f"{block}.experts.router.weight", (shape.experts, hidden))
    size = shape.expert_intermediate_size or shape.intermediate_size
    of_experts = (shape.experts,) if shape.experts else ()
    names = (f"{block}.experts.gate_up", f"{block}.experts.down")
    gate_up, down = names if shape.experts else (f"{block}.gate_up.weight", f"{block}.down.weight")
    if matrix == "w2":
        return initialize(down, (*of_experts, hidden, size))
    return initialize(gate_up, (*of_experts, 2 * size, hidden)).chunk(2, dim=-2)[0 if matrix == "w1" else 1]


def run_rank(trainer: str, values: dict[str, Any], rendezvous: str) -> None:
    """Train in this process, which has one GPU. Rank 0 prints the result."""
    import torch

    device, number = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["RANK"])
    gpus = gpus_of(values)
    rank = Rank(number, gpus, device, ranks_per_node=gpus, rendezvous=rendezvous)
    if trainer == "parallel":
        result = train_parallel(values, rank)
    else:
        result = train_torchtitan(ParallelParameters(**values), rank)
    if number == 0:
        print(MARK + json.dumps(vars(result)), flush=True)


def measure(trainer: str, values: dict[str, Any]) -> Result:
    """Train in a process for each GPU. If the trainer fails, all values are NaN, and its error is printed to stderr."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", trainer, json.dumps(values), f"127.0.0.1:{port}"]
    place = os.environ | {
        "LOCAL_RANK": "0",
        "WORLD_SIZE": f"{gpus_of(values)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    ends, processes = time.monotonic() + TIMEOUT_S, []
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(gpus_of(values))]
        for rank, log in enumerate(logs):
            environment = place | {"RANK": f"{rank}", "CUDA_VISIBLE_DEVICES": visible[rank]}
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        while any(process.poll() is None for process in processes):
            # If one rank fails, the other rank waits.
            if time.monotonic() > ends or any(process.poll() for process in processes):
                for process in processes:
                    process.kill()
            time.sleep(0.1)
        texts = [(log.seek(0), log.read())[1] for log in logs]
    if results := [line for line in texts[0].splitlines() if line.startswith(MARK)]:
        return Result(**json.loads(results[-1].removeprefix(MARK)))
    for process, text in zip(processes, texts, strict=True):
        print(f"{trainer}, exit code {process.returncode}:\n{text[-3000:]}", file=sys.stderr)
    return Result()


def median_result(results: list[Result]) -> Result:
    numbers = [name for name, value in vars(Result()).items() if isinstance(value, float)]
    medians = {name: statistics.median(getattr(result, name) for result in results) for name in numbers}
    return replace(results[0], **medians, step_times_s=[time_s for result in results for time_s in result.step_times_s])


def describe_order(results: dict[str, tuple[Result, Result]]) -> list[str]:
    """Return a line for each pair that the two trainers rank in opposite orders, by more than `ORDER_MARGIN` in one."""
    lines = []
    for first, second in itertools.combinations(results, 2):
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(results[first], results[second], strict=True)]
        differs = any(abs(ratio - 1) > ORDER_MARGIN for ratio in ratios)
        if differs and (ratios[0] - 1) * (ratios[1] - 1) < 0:
            lines.append(f"{first} over {second}: workload=parallel {ratios[0]:.3f}, torchtitan {ratios[1]:.3f}")
    return lines


def print_conclusions(results: dict[str, tuple[Result, Result]]) -> None:
    wrong_order = describe_order({row: pair for row, pair in results.items() if row != "ep 2"})
    print(f"\npairs in another order, of those that differ by more than {ORDER_MARGIN:.0%}: {len(wrong_order)}")
    print("".join(f"  {line}\n" for line in wrong_order), end="")
    for name, margin in (("tokens_per_s", RATE_MARGIN), ("reserved_gib", MEMORY_MARGIN)):
        ratios = {row: getattr(ours, name) / getattr(titan, name) for row, (ours, titan) in results.items()}
        outside = {row: round(ratio, 3) for row, ratio in ratios.items() if not abs(ratio - 1) <= margin}
        print(f"{name}: {len(ratios) - len(outside)} of {len(ratios)} within {margin:.0%}; others: {outside or 'none'}")
    for name in ("first_loss", "loss"):
        gaps = {row: getattr(ours, name) - getattr(titan, name) for row, (ours, titan) in results.items()}
        outside = {row: round(gap, 4) for row, gap in gaps.items() if not abs(gap) <= LOSS_MARGIN}
        print(f"{name}: {len(gaps) - len(outside)} of {len(gaps)} within {LOSS_MARGIN}; others: {outside or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help="by their names")
    parser.add_argument("--sequences", type=int, default=4, help="sequences a step, on each GPU")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of all rows")
    parser.add_argument("--plan", action="store_true", help="print the parameters of the rows only")
    parser.add_argument("--out", type=Path, help="a file that each trial is added to, one JSON object a line")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        trainer, values, rendezvous = args.rank_of
        return run_rank(trainer, json.loads(values), rendezvous)
    changes = {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
    print(f"# {args.sequences} sequences a step and GPU; the median step of {args.steps}; first loss and last one")
    columns = f"{'parallel':>9} {'titan':>9} {'ratio':>6} {'GiB: parallel':>14} {'titan':>6} {'losses: parallel':>17}"
    print(f"{'row':45} {columns} {'titan':>15}")
    results: dict[str, tuple[Result, Result]] = {}
    for number, name in enumerate(args.rows):
        values = ROWS[name] | {"warmup": WARMUP, "steps": args.steps, "learning_rate": LEARNING_RATE} | changes
        values |= {"global_batch": args.sequences * gpus_of(values)}
        if args.plan:
            print(f"{name:45} {values}")
            continue
        turns: dict[str, list[Result]] = {trainer: [] for trainer in TRAINERS}
        for turn in range(args.rounds):
            for trainer in TRAINERS if (number + turn) % 2 == 0 else TRAINERS[::-1]:
                turns[trainer].append(result := measure(trainer, values))
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps({"row": name, "trainer": trainer, "turn": turn, **vars(result)}) + "\n")
        ours, titan = (median_result(turns[trainer]) for trainer in TRAINERS)
        results[name] = (ours, titan)
        rates = f"{ours.tokens_per_s:9,.0f} {titan.tokens_per_s:9,.0f} {ours.tokens_per_s / titan.tokens_per_s:6.3f}"
        kernels = f"{ours.attention}, {titan.attention}"
        losses = " ".join(f"{result.first_loss:7.4f} {result.loss:7.4f}" for result in (ours, titan))
        print(f"{name:45} {rates} {ours.reserved_gib:14.1f} {titan.reserved_gib:6.1f}  {losses} {kernels}", flush=True)
    if results:
        print_conclusions(results)


if __name__ == "__main__":
    main()
