"""Communication kernels in a trace, and the share of a step's time that they take."""

from __future__ import annotations

import pytest

from workloads.parallel.run import compute_shares, is_communication, name_collective


def test_computation_exposed_communication_and_idle_time_add_up() -> None:
    kernels = [
        ("gemm", (0.0, 4.0)),
        ("ncclDevKernel", (3.0, 6.0)),
        ("gemm", (8.0, 9.0)),
        ("ncclDevKernel", (8.5, 10.0)),
    ]
    shares = compute_shares(kernels)
    assert shares["communication_share"] == pytest.approx(0.45)
    assert shares["computation_share"] == pytest.approx(0.5)
    assert shares["exposed_share"] == pytest.approx(0.3)
    assert shares["idle_share"] == pytest.approx(0.2)


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


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allgather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reducescatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "sendrecv"),
        ("rcclKernel_AllReduce", "allreduce"),
    ],
)
def test_a_collective_is_counted_by_its_kernels_name(kernel: str, kind: str) -> None:
    assert name_collective(kernel) == kind
