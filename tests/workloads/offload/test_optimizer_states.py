"""AdamW's states in fp32, bf16 and int8, with and without fp32 master weights, wherever they are stored."""

from dataclasses import replace

import pytest
import torch

from tests.support.llama import Llama
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.llama.attention_kernels import KERNELS
from workloads.llama.model import rope_table
from workloads.models.model import MODELS
from workloads.offload import OffloadParameters, run
from workloads.offload.engine import Engine
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import STATE_DTYPES, AdamW, Precision, Rounding, StateFormat
from workloads.offload.plan import LayerPlan, Location, Plan

CPU = torch.device("cpu")
# 256 features, so that blocks of 256 numbers do not cross from one parameter to the next.
SHAPE = replace(
    MODELS["llama_tiny"],
    layers=2,
    hidden_size=256,
    heads=2,
    kv_heads=1,
    head_size=32,
    intermediate_size=64,
    vocabulary=64,
)
OPTIMIZER = AdamW(learning_rate=1e-3, epsilon=1e-6)
LENGTH, STEPS = 16, 4
FORMATS: list[StateFormat] = ["fp32", "bf16", "int8"]
LOCATIONS: list[Location] = ["device", "host"]


def draw_tokens() -> torch.Tensor:
    return torch.randint(0, SHAPE.vocabulary, (STEPS, 1, 2, 2, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def build_plan(layers: tuple[LayerPlan, ...], location: Location) -> Plan:
    return Plan(
        layers,
        sequence_length=LENGTH,
        sequences_per_chunk=2,
        chunks_per_round=2,
        accumulation_rounds=1,
        embedding_and_head_states=location,
    )


def train(
    precision: Precision, location: Location, optimizer: AdamW = OPTIMIZER
) -> tuple[list[float], dict[str, torch.Tensor], Engine]:
    layers = (LayerPlan(location, location, location),) * SHAPE.layers
    with Arena(32 * 2**20, CPU) as arena:
        engine = Engine(
            SHAPE, build_plan(layers, location), arena, CPU, KERNELS["cpu"], precision=precision, optimizer=optimizer
        )
        engine.initialize(0)
        losses = [float(engine.step(tokens)) for tokens in draw_tokens()]
        return losses, dict(engine.copy_weights()), engine


def train_with_torchao(states: StateFormat) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with PyTorch's autograd and torchao's AdamW in fp32, with momentum and variance in a format."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    model = Llama(SHAPE)
    with Arena(32 * 2**20, CPU) as arena:
        plan = build_plan((LayerPlan(),) * SHAPE.layers, "device")
        engine = Engine(SHAPE, plan, arena, CPU, KERNELS["cpu"], precision=Precision(torch.float32))
        engine.initialize(0)
        model.load_state_dict(dict(engine.copy_weights()), strict=False)
    parameters = dict(model.named_parameters())
    moments = {
        name: [
            OptimState8bit.zeros(parameter.shape, signed)
            if states == "int8"
            else torch.zeros_like(parameter, dtype=STATE_DTYPES[states])
            for signed in (True, False)
        ]
        for name, parameter in parameters.items()
    }
    settings = (OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.weight_decay, OPTIMIZER.epsilon, True, False)
    rope, losses = rope_table(SHAPE, LENGTH, CPU), []
    for step, batch in enumerate(draw_tokens(), 1):
        chunk_losses = [model(chunk[:, :-1], chunk[:, 1:], rope, 1 / 2) for chunk in batch[0]]
        for loss in chunk_losses:
            loss.backward()
        losses.append(sum(float(loss.detach()) for loss in chunk_losses))
        with torch.no_grad():
            for name, parameter in parameters.items():
                rate, number = torch.tensor(OPTIMIZER.learning_rate), torch.tensor(float(step))
                single_param_adam(parameter, parameter.grad, number, *moments[name], None, rate, *settings)
                parameter.grad = None
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("states", FORMATS)
def test_every_format_of_states_trains_like_plain_pytorch_with_torchaos_adamw(states: StateFormat) -> None:
    """A sum in another order may round a state to the next number. So the weights differ, but by less than a tenth of
    what training with another format changes."""
    expected_losses, expected_weights = train_with_torchao(states)
    losses, weights, engine = train(Precision(torch.float32, optimizer_states=states), "host")
    assert losses == pytest.approx(expected_losses, abs=1e-3)
    _, others, _ = train(Precision(torch.float32, optimizer_states="bf16" if states == "fp32" else "fp32"), "device")
    for name, expected in expected_weights.items():
        change = (others[name] - expected).abs().mean()
        assert (weights[name] - expected).abs().mean() < 0.1 * change, name
    assert engine.describe_types()["type_of_optimizer_states"] == states


@pytest.mark.parametrize(
    ("states", "master_weights", "rounding"),
    [("fp32", False, "stochastic"), ("bf16", True, "nearest"), ("int8", True, "nearest")],
)
def test_placements_train_alike_and_take_the_bytes_that_are_planned_for(
    states: StateFormat, master_weights: bool, rounding: Rounding
) -> None:
    precision = Precision(torch.bfloat16, master_weights, optimizer_states=states)
    optimizer = replace(OPTIMIZER, rounding=rounding)
    on_device, on_host = (train(precision, location, optimizer) for location in LOCATIONS)
    assert on_device[0] == on_host[0]
    assert all(torch.equal(weight, on_host[1][name]) for name, weight in on_device[1].items())
    state_bytes = sum(buffer.tensor.nbytes for buffer in on_host[2]._layers[0].optimizer_states)
    planned = precision.list_state_vectors(SHAPE.block_parameters(0))
    assert state_bytes == sum(count * dtype.itemsize for count, dtype in planned)
    assert on_host[2].describe_types()["type_of_master_weights"] == ("fp32" if master_weights else "none")


def test_stochastic_rounding_keeps_the_mean_of_updates_that_nearest_rounding_loses() -> None:
    """Each of 8 updates takes 1e-3 from weights of 1 and -1, less than half the distance to the next bf16 number."""
    gradients = torch.ones(2**16, dtype=torch.bfloat16)
    for rounding, expected in (("nearest", 0.0), ("stochastic", -8e-3)):
        weights = torch.ones(2**16, dtype=torch.bfloat16)
        weights[::2] = -1
        before = weights.float()
        optimizer = AdamW(learning_rate=1e-3, weight_decay=0, rounding=rounding)
        states = [torch.zeros(2**16) for _ in range(2)]
        for step in range(1, 9):
            optimizer.apply(step, weights, gradients, *states)
        # A weight's deviation is at most half of the 0.0078 after each update: five deviations of the mean of 32,768.
        for half in (0, 1):
            change = (weights.float() - before)[half::2]
            assert float(change.mean()) == pytest.approx(expected, abs=5 * 0.0039 * 8**0.5 / 2**7.5)
            assert len(change.unique()) == 1 if rounding == "nearest" else 2 <= len(change.unique()) <= 9


def test_states_of_a_trial_are_read_back() -> None:
    parameters = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "steps": 1}
    parameters |= {"device_gib": 1.0, "host_gib": 0.0, "optimizer_states": "int8", "master_weights": "fp32"}
    parameters |= {"rounding": "nearest"}
    measurement = run_trial("offload", parameters, Rank())
    assert measurement.executed["rounding"] == "nearest"
    assert measurement.executed["optimizer_states"] == "int8" == measurement.machine_info["type_of_optimizer_states"]


def test_int8_states_without_torchao_are_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    parameters = OffloadParameters(device_gib=1.0, host_gib=0.0, optimizer_states="int8")
    with pytest.raises(Infeasible, match=r"needs the package torchao: pip install 'gpu-sweeper\[precision\]'"):
        run.select_precision(parameters, "sm90")
