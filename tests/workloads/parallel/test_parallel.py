"""A model divided over ranks trains as it does in one process: real processes, with gloo between them."""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.conftest import Workspace
from workloads import device as devices
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.distributed import process_group
from workloads.llama.model import Llama, rope_table
from workloads.llama.sdpa import causal_attention
from workloads.llama.shapes import MODELS
from workloads.parallel.apply import ModelSpec, build_groups, build_stages, gather_gradients
from workloads.parallel.async_tp import separate_group_names
from workloads.parallel.batches import Batch, TokenSource, local_sequences
from workloads.parallel.communication import compute_shares, is_communication
from workloads.parallel.fsdp import reduction_dtype
from workloads.parallel.layout import SPLIT_BACKWARD_SCHEDULES, BlockKind, Checkpointing, Layout, State
from workloads.parallel.rules import TORCH_VERSION
from workloads.parallel.stage import build_initializer
from workloads.parallel.train import Trainer

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama_tiny"], layers=4)
LENGTH, BATCH, STEPS = 32, 8, 2
RANKS = 8
LAYOUTS = [
    Layout(),
    Layout(dp_shard=2, micro_batch=2),
    Layout(dp_shard=2, micro_batch=2, reshard_after_forward=False),
    Layout(dp_replicate=2, micro_batch=2),
    Layout(dp_replicate=2, dp_shard=2, checkpointing="full"),
    Layout(tp=2, micro_batch=4),
    Layout(cp=2, cp_method="ring", micro_batch=4),
    Layout(cp=2, dp_shard=2, micro_batch=4, checkpointing="full"),
    Layout(dp_shard=2, tp=2, micro_batch=4, checkpointing="selective"),
    Layout(pp=2, micro_batch=2),
    Layout(pp=4, micro_batch=2),
    Layout(pp=2, stages_per_rank=2, schedule="zbv", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, stages_per_rank=2, schedule="dualpipev", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, dp_shard=2, stages_per_rank=2, schedule="interleaved"),
    Layout(pp=2, dp_shard=2, stages_per_rank=2, schedule="zero_bubble", reshard_after_forward=False),
    Layout(pp=2, cp=2, micro_batch=4),
]
# With the manual block, and with state bf16: without FSDP on one rank, and without clipping.
MANUAL_LAYOUTS = [
    Layout(micro_batch=4),
    Layout(dp_shard=2, micro_batch=2, reshard_after_forward=False, checkpointing="selective"),
    Layout(pp=2, dp_shard=2, micro_batch=2, checkpointing="full"),
]
# Slow ones, which combine what the layouts above have, and some that are contained in those.
LONG_LAYOUTS = [
    Layout(pp=2, tp=2, micro_batch=4),
    Layout(cp=2, tp=2, micro_batch=8),
    Layout(cp=2, micro_batch=4),
    Layout(pp=2, stages_per_rank=2, schedule="interleaved", micro_batch=2),
    Layout(pp=2, stages_per_rank=2, schedule="zero_bubble", micro_batch=2, reshard_after_forward=False),
    Layout(pp=2, dp_shard=2, checkpointing="full"),
    *(
        Layout(pp=2, stages_per_rank=2, schedule=schedule, reshard_after_forward=False, **fields)  # type: ignore[arg-type]
        for schedule in ("zbv", "dualpipev")
        for fields in ({"dp_shard": 2}, {"tp": 2}, {"checkpointing": "full"})
    ),
    Layout(tp=2, micro_batch=4, checkpointing="selective"),
    Layout(cp=4, micro_batch=4),
    Layout(cp=4, cp_method="ring", micro_batch=4),
    Layout(cp=8, cp_method="ring", micro_batch=8),
    Layout(cp=2, cp_method="ring", tp=2, dp_shard=2, checkpointing="full"),
    Layout(cp=2, cp_method="ring", pp=2, micro_batch=2),
    Layout(dp_replicate=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
]
LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LAYOUTS]
MANUAL_LAYOUTS = [replace(layout, global_batch=BATCH) for layout in MANUAL_LAYOUTS]
LONG_LAYOUTS = [replace(layout, global_batch=BATCH) for layout in LONG_LAYOUTS]


@dataclass(frozen=True)
class Trained:
    """The losses of all steps, and the first step's gradients and their norm."""

    losses: list[float]
    gradients: dict[str, Tensor]
    norm: float


def draw_batch(document_tokens: int = 0) -> Batch:
    """Return a batch of uniform tokens, whose sequences are packed with documents."""
    lengths = TokenSource(SHAPE.vocabulary, LENGTH, 0, document_tokens).draw(0, range(BATCH)).document_lengths
    return Batch(tokens(), lengths)


def tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Call:
    """A layout for the processes of `Ranks` to train; `sequence_number` differs between calls."""

    sequence_number: int
    layout: Layout
    spec: ModelSpec


def initialize(name: str, size: tuple[int, ...]) -> Tensor:
    """Return a parameter's initial values, the embedding's so small that the gradients have to be clipped."""
    values = build_initializer(0, CPU)(name, size)
    return values / 50 if name == "embedding.weight" else values


def train(call: Call, rank: Rank) -> Trained:
    """Train a few steps. Returns the losses, and the whole gradients of the first step of this rank's stages."""
    device, layout = devices.device_of(rank), call.layout
    with process_group(rank, device):
        if layout.async_tp:
            separate_group_names(call.sequence_number)
        groups = build_groups(layout, device.type)
        stages = build_stages(call.spec, layout, groups, device, initialize)
        trainer = Trainer(stages, layout, groups, device, learning_rate=1e-3)
        local = draw_batch(call.spec.document_tokens).select(local_sequences(layout, groups))
        losses = [float(trainer.compute_gradients(local))]
        gradients = gather_gradients(stages, SHAPE, layout.tp)
        gradients = {name: gradient.to(CPU, copy=True) for name, gradient in gradients.items()}
        trainer.update()
        norm = float(trainer.gradient_norm)  # type: ignore[arg-type]
        return Trained(losses + [float(trainer.step(local)) for _ in range(STEPS - 1)], gradients, norm)


def serve(number: int, device: str, port: int, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    while (call := calls.get()) is not None:
        faulthandler.dump_traceback_later(90)
        world_size = call.layout.world_size
        rank = Rank(
            number,
            world_size,
            device,
            rendezvous=f"127.0.0.1:{port + world_size}",
            sequence_number=call.sequence_number,
        )
        try:
            answers.put((number, train(call, rank)))
        except Exception:
            answers.put((number, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


class Ranks:
    """Processes that train one layout after the other, each in a new process group."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        # Importing torch in a new process takes seconds; a process that has used a GPU cannot be forked.
        self._device = device
        context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._calls = [context.Queue() for _ in range(count)]
        self._answers = context.Queue()
        self._sequence_number = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            context.Process(target=serve, args=(n, device, port, calls, self._answers), daemon=True)
            for n, calls in enumerate(self._calls)
        ]
        with pytest.MonkeyPatch.context() as patch:
            for n, process in enumerate(self._processes):
                if device == "cuda":
                    patch.setenv("CUDA_VISIBLE_DEVICES", str(n))  # as a worker sees it
                process.start()

    def train(self, layout: Layout, **fields: Any) -> list[Trained]:
        """Train on as many processes as the layout has ranks. Returns each rank's result."""
        self._sequence_number += 1
        for calls in self._calls[: layout.world_size]:
            calls.put(
                Call(self._sequence_number, layout, ModelSpec(SHAPE, LENGTH, **({"dtype": torch.float32} | fields)))
            )
        results: dict[int, Trained] = {}
        for _ in range(layout.world_size):
            number, answer = self._answers.get(timeout=100)
            if isinstance(answer, str):  # the other ranks may wait for this one forever
                self.close()
                self.__init__(len(self._processes), self._device)  # type: ignore[misc]
                pytest.fail(answer)
            results[number] = answer
        return [results[number] for number in range(layout.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(RANKS)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def reference() -> Trained:
    return train_in_one_process(draw_batch())


def train_in_one_process(batch: Batch) -> Trained:
    """Train the whole model by PyTorch in one process, each document alone, with nothing of what is tested."""
    lengths = [[LENGTH]] * BATCH if batch.document_lengths is None else batch.document_lengths.tolist()
    documents = [
        (row[None, :-1][:, stop - length : stop], row[None, 1:][:, stop - length : stop])
        for row, row_lengths in zip(batch.tokens, lengths, strict=True)
        for stop, length in zip(itertools.accumulate(row_lengths), row_lengths, strict=True)
    ]
    model = Llama(SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initialize(name, tuple(parameter.shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rope = rope_table(SHAPE, LENGTH, CPU)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    norms = []
    for _ in range(STEPS):
        losses.append(0.0)
        for inputs, targets in documents:
            loss = model(inputs, targets, rope[:, : inputs.shape[1]]) * inputs.numel() / (BATCH * LENGTH)
            loss.backward()
            losses[-1] += float(loss.detach())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] > 1.0  # so that clipping has an effect
    return Trained(losses, gradients, norms[0])


@pytest.mark.long(40)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout), reference)


@pytest.mark.long(10)
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", MANUAL_LAYOUTS, ids=str)
def test_the_manual_block_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout, block="manual"), reference)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_with_the_manual_block_trains_like_one_process(
    layout: Layout, ranks: Ranks, reference: Trained
) -> None:
    if layout.tp * layout.cp > 1 or layout.schedule == "zero_bubble":
        pytest.skip("the manual block has whole weights and sequences, and one backward pass")
    assert_same_training(ranks.train(layout, block="manual"), reference)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LONG_LAYOUTS, ids=str)
def test_every_long_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout), reference)


PACKED = [
    pytest.param(Layout(pp=2, dp_shard=2, checkpointing="full"), marks=pytest.mark.long(40)),
    *(
        pytest.param(layout, marks=pytest.mark.soak)
        for layout in (
            Layout(),
            Layout(tp=2, micro_batch=4, checkpointing="selective"),
            Layout(dp_replicate=2, dp_shard=2, micro_batch=2),
            Layout(pp=2, stages_per_rank=2, schedule="interleaved", micro_batch=2),
            Layout(pp=2, stages_per_rank=2, schedule="zero_bubble", micro_batch=2, reshard_after_forward=False),
            Layout(pp=2, stages_per_rank=2, schedule="dualpipev", checkpointing="full", reshard_after_forward=False),
        )
    ),
]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("layout", PACKED, ids=str)
def test_packed_documents_train_as_each_of_them_alone(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    alone = train_in_one_process(draw_batch(document_tokens=12))
    assert abs(alone.losses[0] - reference.losses[0]) > 1e-4
    assert_same_training(ranks.train(replace(layout, global_batch=BATCH), document_tokens=12), alone)


@pytest.mark.soak
def test_packed_documents_train_alike_in_compiled_blocks(ranks: Ranks) -> None:
    layout = Layout(tp=2, micro_batch=4, checkpointing="selective", global_batch=BATCH)
    alone = train_in_one_process(draw_batch(document_tokens=12))
    assert_same_training(ranks.train(layout, compiled=True, document_tokens=12), alone)


COMPILED = [
    Layout(dp_shard=2, micro_batch=4, checkpointing="selective"),
    Layout(tp=2, micro_batch=4),
    Layout(tp=2, dp_shard=2, micro_batch=4),
    Layout(tp=2, micro_batch=4, checkpointing="full"),
    Layout(tp=2, micro_batch=4, checkpointing="selective"),
    Layout(cp=2, micro_batch=4),
    Layout(pp=2, micro_batch=4),
]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [replace(layout, global_batch=BATCH) for layout in COMPILED], ids=str)
def test_every_compiled_layout_trains_like_one_process(layout: Layout, ranks: Ranks, reference: Trained) -> None:
    assert_same_training(ranks.train(layout, compiled=True), reference)
    if layout.tp * layout.cp == 1:
        assert_same_training(ranks.train(layout, compiled=True, block="manual"), reference)


def test_a_block_compiles_as_one_graph_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph break would be measured as the layout's own time."""
    graphs: list[GraphModule] = []

    def run_eagerly(graph: GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compile_module, backend=run_eagerly))
    layout = Layout(schedule="zero_bubble", micro_batch=BATCH, global_batch=BATCH)  # its blocks are compiled whole
    with process_group(Rank(), CPU):
        spec, groups = ModelSpec(SHAPE, LENGTH, torch.float32, compiled=True), build_groups(layout, "cpu")
        (stage,) = build_stages(spec, layout, groups, CPU, build_initializer(0, CPU))
        stage(tokens()[:, :-1])
        assert len(graphs) == 1
        stage.blocks["0"].attention = torch.compiler.disable(causal_attention)
        with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
            stage(tokens()[:, :-1])


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS + LONG_LAYOUTS if layout.world_size == 2], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layouts_over_two_gpus_train_like_one_cpu_process(
    layout: Layout, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES and (compiled or TORCH_VERSION < (2, 13)):
        pytest.skip("a split backward pass needs blocks that are not compiled, and torch 2.13")
    assert_same_training(gpus.train(layout, compiled=compiled), reference, tolerance=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_asynchronous_tensor_parallel_trains_like_one_cpu_process_trial_after_trial(
    checkpointing: Checkpointing, gpus: Ranks, reference: Trained
) -> None:
    layout = Layout(tp=2, async_tp=True, micro_batch=4, checkpointing=checkpointing, global_batch=BATCH)
    assert_same_training(gpus.train(layout, compiled=True), reference, tolerance=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("block", ["pytorch", "manual"])
def test_a_cuda_graph_trains_like_one_cpu_process(
    block: BlockKind, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    layout = Layout(micro_batch=2, cuda_graph=True, global_batch=BATCH)
    trained = gpus.train(layout, block=block, compiled=compiled, state="bf16")  # without FSDP; the products are in fp32
    assert_same_training(trained, reference, tolerance=2e-5)


def assert_same_training(trained: list[Trained], reference: Trained, tolerance: float = 1e-5) -> None:
    """Check that every rank has the reference's losses, and that the ranks' gradients together are the reference's."""
    gradients: dict[str, Tensor] = {}
    for rank in trained:
        assert rank.losses == pytest.approx(reference.losses, abs=tolerance)
        assert rank.norm == pytest.approx(reference.norm, rel=tolerance)
        gradients |= rank.gradients
    assert gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error < tolerance, name


@pytest.mark.long(11)
@pytest.mark.xdist_group("ranks")
def test_fp8_layers_train_the_same_in_every_layout_and_near_fp32(ranks: Ranks, reference: Trained) -> None:
    one_rank = Layout(micro_batch=2, global_batch=BATCH)
    (fp8_reference,) = ranks.train(one_rank, recipe="fp8_tensorwise")
    # FSDP casts weights before it gathers them.
    assert_same_training(ranks.train(replace(one_rank, dp_shard=2), recipe="fp8_tensorwise"), fp8_reference)
    assert_same_training(ranks.train(replace(one_rank, pp=2), recipe="fp8_tensorwise"), fp8_reference)
    fp8_losses, fp32_losses = fp8_reference.losses, reference.losses
    assert fp8_losses == pytest.approx(fp32_losses, abs=0.02)
    assert fp8_losses != pytest.approx(fp32_losses, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_fp8_layers_train_nearly_the_same_with_tensor_parallelism(recipe: str, dp_shard: int, ranks: Ranks) -> None:
    """Sums in another order are rounded to other fp8 numbers here and there."""
    one_rank = Layout(micro_batch=2, global_batch=BATCH)
    (expected,) = ranks.train(one_rank, recipe=recipe)
    for rank in ranks.train(replace(one_rank, tp=2, dp_shard=dp_shard), recipe=recipe):
        assert rank.losses == pytest.approx(expected.losses, abs=2e-3)
        assert rank.norm == pytest.approx(expected.norm, rel=0.02)


# Sequences that leave each rank 16 tokens and more, as fp8 products of a GPU need.
FP8_LAYOUTS = [Layout(dp_shard=2, micro_batch=2), Layout(tp=2, micro_batch=2), Layout(pp=2, micro_batch=2)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [replace(layout, global_batch=BATCH) for layout in FP8_LAYOUTS], ids=str)
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp8_layouts_over_two_gpus_train_nearly_like_fp32(
    layout: Layout, recipe: str, compiled: bool, gpus: Ranks, reference: Trained
) -> None:
    """bf16 beside fp8, as scaled products give bf16; with tensor parallelism fp8 is gathered over NCCL."""
    for rank in gpus.train(layout, recipe=recipe, compiled=compiled, dtype=torch.bfloat16):
        assert rank.losses == pytest.approx(reference.losses, abs=0.05)
        assert rank.norm == pytest.approx(reference.norm, rel=0.1)


def test_exposed_communication_is_the_time_in_which_nothing_is_computed() -> None:
    kernels = [
        ("gemm", (0.0, 4.0)),
        ("ncclDevKernel", (3.0, 6.0)),
        ("gemm", (8.0, 9.0)),
        ("ncclDevKernel", (8.5, 10.0)),
    ]
    shares = compute_shares(kernels)
    assert shares["communication_share"] == pytest.approx(0.45)
    assert shares["exposed_share"] == pytest.approx(0.3)
    assert shares["idle_share"] == pytest.approx(0.5)


# Names as the profiler has recorded them: NCCL's, RCCL's and MSCCL's, and kernels that compute or copy.
@pytest.mark.parametrize(
    ("kernel", "communicates"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", True),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", True),
        ("mscclKernel_Sum_half_LL", True),
        ("rcclKernel_AllReduce", True),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64", False),
        ("__amd_rocclr_copyBuffer.kd", False),
        ("Memcpy HtoD (Pinned -> Device)", False),
    ],
)
def test_kernels_of_nccl_rccl_and_msccl_are_communication(kernel: str, communicates: bool) -> None:
    assert is_communication(kernel) == communicates


def test_an_invalid_layout_is_infeasible_before_ranks_wait_for_each_other() -> None:
    with pytest.raises(Infeasible, match="= 2 ranks, but there are 4"):
        run_trial("parallel", {"model": "llama_tiny", "dtype": "fp32", "dp_shard": 2}, Rank(0, 4, ranks_per_node=4))


def test_gradients_of_bf16_products_are_accumulated_in_fp32_beside_fp32_weights() -> None:
    """Eight micro-batches, with and without gathering the weights for each, and the bf16 state beside them."""
    gradients, dtypes = {}, {}
    with process_group(Rank(), CPU):
        for dtype, state, reshard in CASES:
            layout = Layout(global_batch=BATCH, reshard_after_forward=reshard)
            groups = build_groups(layout, "cpu")
            spec = ModelSpec(SHAPE, LENGTH, dtype, state=state)
            stages = build_stages(spec, layout, groups, CPU, build_initializer(0, CPU))
            trainer = Trainer(stages, layout, groups, CPU, learning_rate=1e-3)
            trainer.compute_gradients(Batch(tokens()))
            name = "blocks.0.down.weight"
            gradients[dtype, state, reshard] = gather_gradients(stages, SHAPE, 1)[name].clone()
            trainer.update()
            dtypes[dtype, state, reshard] = trainer.state_dtypes() | ({reduction_dtype(stages[0])} - {None})
    exact = gradients[CASES[0]]
    errors = {case: float((gradient - exact).norm() / exact.norm()) for case, gradient in gradients.items()}
    assert all(dtypes[case] == {torch.float32 if case[1] == "fp32" else torch.bfloat16} for case in CASES)
    assert errors[CASES[1]] == pytest.approx(errors[CASES[2]], rel=0.01) and 0 < errors[CASES[1]] < errors[CASES[3]]


CASES: list[tuple[torch.dtype, State, bool]] = [
    (torch.float32, "fp32", True),
    (torch.bfloat16, "fp32", True),
    (torch.bfloat16, "fp32", False),
    (torch.bfloat16, "bf16", True),
]


def test_a_tied_model_trains() -> None:
    """Its head is its embedding, so the last stage has no head of its own."""
    shape = replace(SHAPE, tied=True)
    with process_group(Rank(), CPU):
        layout = Layout(global_batch=2)
        groups = build_groups(layout, "cpu")
        spec = ModelSpec(shape, LENGTH, torch.float32)
        stages = build_stages(spec, layout, groups, CPU, build_initializer(0, CPU, is_tied=True))
        trainer = Trainer(stages, layout, groups, CPU, learning_rate=1e-3)
        losses = [float(trainer.step(Batch(tokens()[:2]))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.soak  # `make test` runs such trials in test_run.py, and a sweep with estimates in test_command.py
def test_a_sweep_over_layouts_reports_how_well_they_were_predicted(workspace: Workspace) -> None:
    """The same two workers run all trials, each in a new process group."""
    fixed = ["space.micro_batch=4", "space.checkpointing=none", "space.cp=1", "space.pp=1"]
    fixed += ["space.dp_replicate=1", "space.steps=3"]
    result = workspace.run(
        "workload=parallel", "gpus=2", "finals.top=0", "search=grid", "space.reshard_after_forward=true", *fixed
    )
    assert result.code == 0, result.err
    runs = workspace.runs("trial")
    assert sorted((run.data.params["dp_shard"], run.data.params["tp"]) for run in runs) == [("1", "2"), ("2", "1")]
    for run in runs:
        metrics = run.data.metrics
        assert metrics["predicted_tokens_per_s"] > 0 and metrics["tokens_per_s_per_gpu"] > 0
        assert metrics["loss"] == pytest.approx(runs[0].data.metrics["loss"], abs=1e-4)
        assert sum(value for name, value in metrics.items() if name.startswith("calls_")) > 0
        # Blocks with whole weights have a manual backward pass and choose their attention kernel themselves.
        kernel = "cpu" if run.data.params["dp_shard"] == "2" else "scaled_dot_product_attention"
        assert run.data.tags["attention"] == kernel
    assert "model    estimates are" in result.out
    (parent,) = workspace.runs("sweep")
    assert parent.data.metrics["predicted_error"] > 0
    projected = json.loads(parent.data.tags["projected_tokens_per_s"])
    assert list(projected) == ["2", "4", "8", "16"] and projected["4"] > 1.5 * projected["2"] > 0
    assert "the batch grows with the replicas" in parent.data.tags["projection_assumes"]
