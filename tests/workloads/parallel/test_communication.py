"""Communication kernels in a trace, and the share of a step's time that they take."""

import pytest

from workloads.parallel.profiling import compute_part_shares, compute_shares, is_communication, name_collective


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


# Names as an H100's profiler has recorded them.
def test_parts_of_a_mixture_of_experts_are_told_by_their_kernels() -> None:
    grouped = "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversal"
    kernels = [
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float*)", (0.0, 1.0)),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel", (1.0, 2.0)),
        ("sum_rows_kernel", (2.0, 4.0)),
        (f"{grouped}INS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEE", (4.0, 8.0)),
        ("triton_red_fused__log_softmax_exp_sub_0", (8.0, 10.0)),  # of the loss
        ("nvjet_sm90_tst_192x192_64x4_1x1_h_bz_coopB_TNN", (10.0, 16.0)),
    ]
    shares = compute_part_shares(kernels, exchanged=[(1.0, 5.0)])
    assert shares == {
        "router_share": 1 / 16,
        "permutation_share": 3 / 16,
        "experts_share": 4 / 16,
        "exchange_share": 4 / 16,
    }


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
