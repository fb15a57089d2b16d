"""The rates and the model with which tests plan offloading."""

from dataclasses import replace

import torch

from workloads.models.model import MODELS
from workloads.offload.cost_model import DeviceRates, MemoryBudget, ModelSizes
from workloads.offload.plan_search import Prediction, find_fastest_plan

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama3_8b"], layers=8)
# About those of one H200: 620 TFLOP/s, copies of 50.8 GB/s in each direction at once.
H200 = DeviceRates(
    forward_s_per_token=0.92e-6,
    backward_s_per_token=1.9e-6,
    recompute_s_per_token={"full": 0.0, "gate": 0.18e-6, "projections": 0.36e-6, "attention": 0.5e-6, "input": 0.72e-6},
    lm_head_s_per_token=5.1e-6,
    h2d_s_per_byte=1 / 50.8e9,
    d2h_s_per_byte=1 / 50.8e9,
    optimizer_s_per_byte=4e-12,
    workspace_bytes_per_token=180e3,
    min_chunk_tokens=8192,
)
SLOW_LINK = replace(H200, h2d_s_per_byte=10 * H200.h2d_s_per_byte, d2h_s_per_byte=10 * H200.d2h_s_per_byte)
MODEL = ModelSizes(SHAPE, element_bytes=2, state_bytes_per_parameter=4)


def find_plan(device_gib: float, host_gib: float, sequences: int = 8, rates: DeviceRates = H200) -> Prediction:
    return find_fastest_plan(MODEL, 8192, sequences, MemoryBudget(device_gib, host_gib), rates)
