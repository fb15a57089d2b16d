"""One test for each use of what PyTorch does not document. Its message says what to do where a version changed it."""

import inspect
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import debug
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend

from tests.support import canaries
from workloads.api.contract import Rank
from workloads.instruments import torch_internals
from workloads.instruments.distributed import process_group

CPU = torch.device("cpu")
canary = partial(canaries.canary, "torch")
REPOSITORY = Path(__file__).resolve().parents[3]
# The arguments by position of the functions in workloads/llama/attention_kernels.py.
INPUTS = "query, key, value, "
BACKWARD = "query, key, value, out, logsumexp, "
ATTENTION = {
    "cudnn_attention": INPUTS + "attn_bias, compute_log_sumexp, dropout_p, is_causal",
    "cudnn_attention_backward": "grad_out, " + BACKWARD + "philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,"
    " max_q, max_k, dropout_p, is_causal",
    "flash_attention": INPUTS + "dropout_p, is_causal",
    "flash_attention_backward": "grad_out, " + BACKWARD + "cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,"
    " philox_seed, philox_offset",
    "efficient_attention": INPUTS + "attn_bias, compute_log_sumexp, dropout_p, is_causal",
    "efficient_attention_backward": "grad_out_, " + INPUTS + "attn_bias, out, logsumexp, philox_seed, philox_offset,"
    " dropout_p, grad_input_mask, is_causal",
    "flash_attention_for_cpu": INPUTS + "dropout_p, is_causal",
    "flash_attention_for_cpu_backward": "grad_out, " + BACKWARD + "dropout_p, is_causal",
}


@pytest.mark.parametrize("name", ATTENTION)
def test_an_attention_kernel_takes_its_arguments_in_this_order(name: str) -> None:
    remedy = "Adapt its call in workloads/llama/attention_kernels.py, then this list."
    with canary(f"aten::_scaled_dot_product_{name}", remedy):
        schema = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default._schema
        arguments = ", ".join(argument.name for argument in schema.arguments)
        assert arguments.startswith(ATTENTION[name]), arguments
        assert "backward" in name or re.match(r"(log_?sumexp)", schema.returns[1].name), schema.returns[1].name


def test_pytorch_says_which_attention_kernel_it_takes() -> None:
    remedy = "Adapt choose_sdpa_backend: without it a rate of the mathematical kernel could stand for a fused one."
    with canary("torch._fused_sdp_choice", remedy):
        q = torch.randn(1, 2, 16, 16)
        assert torch_internals.choose_sdpa_backend(q, q, q) == SDPBackend.FLASH_ATTENTION
        assert (
            torch_internals.choose_sdpa_backend(q.double()[..., :3], *[q.double()[..., :3]] * 2)
            in SDPBackend.__members__.values()
        )


def test_a_gpu_can_be_delayed() -> None:
    remedy = "Adapt delay_gpu: another kernel that takes long enough for the host to queue a series of calls."
    with canary("torch.cuda._sleep", remedy):
        assert list(inspect.signature(torch.cuda._sleep).parameters) == ["cycles"]


def test_dtensor_forgets_process_groups() -> None:
    remedy = (
        "Adapt forget_process_groups, and run tests/workloads/parallel: a worker trains one layout after the other."
    )
    with canary("torch.distributed.tensor.debug._clear_sharding_prop_cache", remedy):
        assert hasattr(debug, "_clear_sharding_prop_cache"), "it is gone"
        torch_internals.forget_process_groups()


def test_a_parallel_style_can_be_read_from_its_hook() -> None:
    layer = torch.nn.Linear(2, 2)
    assert torch_internals.input_style(layer) == ""
    with canary("hooks of torch.distributed.tensor.parallel", "Adapt input_style."), process_group(Rank(), CPU):
        parallelize_module(layer, init_device_mesh("cpu", (1,)), ColwiseParallel())
        assert torch_internals.input_style(layer) == "ColwiseParallel"


def test_code_that_cannot_be_compiled_has_its_own_error() -> None:
    uncompiled = torch.compiler.disable(torch.sin)
    remedy = "Adapt compile_error: a cast that cannot be compiled would be a failure instead of infeasible."
    with canary("torch._dynamo.exc.Unsupported", remedy), pytest.raises(torch_internals.compile_error()):
        torch.compile(lambda x: uncompiled(x), fullgraph=True, backend="eager")(torch.ones(1))


def test_inductor_has_the_option_of_persistent_kernels() -> None:
    remedy = "Adapt supports_persistent_tma and the option in workloads/matmul/operands.py."
    with canary("torch._inductor.config.triton", remedy):
        assert torch_internals.supports_persistent_tma()


def test_a_profiler_has_its_events_without_a_tree() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(1).sin()
    with canary("profile.profiler.kineto_results", "Adapt recorded_events and profile_step."):
        [sine] = [event for event in torch_internals.recorded_events(profiler) if event.name() == "aten::sin"]
        assert sine.end_ns() > sine.start_ns() and not sine.is_user_annotation()
        assert sine.device_type() == DeviceType.CPU


def test_asynchronous_tensor_parallelism_can_be_enabled() -> None:
    remedy = "Adapt workloads/parallel/apply.py to torchtitan/distributed/compile.py of that version."
    with canary("what asynchronous tensor parallelism needs", remedy):
        symmetric_memory = import_module("torch.distributed._symmetric_memory")
        assert list(inspect.signature(symmetric_memory.enable_symm_mem_for_group).parameters) == ["group_name"]
        assert hasattr(import_module("torch._inductor.config"), "_micro_pipeline_tp")
        assert isinstance(torch.distributed.distributed_c10d._world.group_count, int)


def test_pytorch_takes_flash_attention_4_from_a_module() -> None:
    with canary("torch.nn.attention._fa4", "Adapt register_flash4 and workloads/llama/pytorch_attention.py."):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            torch_internals.register_flash4("no_such_module")
        with pytest.raises(RuntimeError, match="does not expose FA4 kernels"):
            torch_internals.register_flash4("json")


def test_flash_attention_4_has_its_two_functions() -> None:
    """Where it is installed, which is on Linux with CUDA 13. It is pinned to one version."""
    assert re.search(r'"flash-attn-4\[cu13\]==[\w.]+;', (REPOSITORY / "pyproject.toml").read_text())
    interface = pytest.importorskip("flash_attn.cute.interface")
    remedy = "Adapt _flash4_fwd and _flash4_bwd in workloads/llama/attention_kernels.py."
    with canary("flash_attn.cute.interface", remedy):
        forward = inspect.signature(interface._flash_attn_fwd).parameters
        backward = inspect.signature(interface._flash_attn_bwd).parameters
        assert list(forward)[:3] == ["q", "k", "v"] and {"causal", "return_lse"} <= forward.keys()
        assert list(backward)[:6] == ["q", "k", "v", "out", "dout", "lse"] and "causal" in backward


def test_fsdp_waits_for_the_computing_stream_before_it_allocates_a_reduced_gradient() -> None:
    """`workloads.parallel.apply.OnePoolReduceScatter` allocates it for that stream, which needs this order.

    If a later version differs, allocate in the current stream again (which takes more memory).
    """
    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    order = [
        source.index(text) for text in ("wait_stream(current_stream)", "reduce_output = reduce_scatter_comm.allocate(")
    ]
    assert order == sorted(order)
