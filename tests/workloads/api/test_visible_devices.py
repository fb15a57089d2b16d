"""The variables that choose GPUs name the same ones to Ray, to torch and to a command."""

import pytest

from workloads.api.visible_devices import CUDA, HIP, ROCR, restrict_program, select, settle, unify


@pytest.mark.parametrize(
    ("site", "unified"),
    [
        ({}, {}),
        ({ROCR: "4,5"}, {HIP: "4,5"}),
        ({ROCR: ""}, {HIP: ""}),
        ({HIP: "4,5"}, {HIP: "4,5"}),
        ({CUDA: "2,3"}, {HIP: "2,3", CUDA: "2,3"}),
        ({HIP: "1", CUDA: "0,1,2,3"}, {HIP: "1", CUDA: "1"}),
        # HIP counts among the GPUs of ROCR, and without HIP_VISIBLE_DEVICES so it does with CUDA_VISIBLE_DEVICES.
        ({ROCR: "4,5,6,7", HIP: "0,2"}, {HIP: "4,6"}),
        ({ROCR: "4,5", CUDA: "1"}, {HIP: "5", CUDA: "5"}),
        # Slurm may set all names to one list.
        ({ROCR: "4,5", HIP: "4,5", CUDA: "4,5"}, {HIP: "4,5", CUDA: "4,5"}),
        ({ROCR: "GPU-0a,GPU-0b", HIP: "1"}, {HIP: "GPU-0b"}),
    ],
)
def test_amd_gpus_are_named_where_ray_reads_them(site: dict[str, str], unified: dict[str, str]) -> None:
    environment = dict(site)
    unify(environment)
    assert environment == unified
    unify(environment)  # a sweep that starts sweeps
    assert environment == unified


@pytest.mark.parametrize(
    ("chosen", "selected"), [("0,9,1", "4"), ("9", ""), ("GPU-0a", "GPU-0a"), ("", ""), ("NoDevFiles", "NoDevFiles")]
)
def test_an_index_out_of_range_ends_the_list_as_in_hip(chosen: str, selected: str) -> None:
    assert select("4,5", chosen) == selected


@pytest.mark.parametrize(
    ("variable", "settled"), [(HIP, {ROCR: "4,5", HIP: "1", CUDA: "1"}), (CUDA, {CUDA: "0,1,2,3"})]
)
def test_in_a_worker_no_variable_contradicts_the_one_that_ray_sets(variable: str, settled: dict[str, str]) -> None:
    environment = {ROCR: "4,5", HIP: "1", CUDA: "0,1,2,3"}
    settle(environment, variable)
    assert environment == settled


@pytest.mark.parametrize(
    ("worker", "program"),
    [
        ({HIP: "4"}, {ROCR: "4,5,6,7", HIP: "0,1,2,3"}),
        ({HIP: "4", CUDA: "4"}, {ROCR: "4,5,6,7", HIP: "0,1,2,3", CUDA: "0,1,2,3"}),
        ({CUDA: "4"}, {CUDA: "4,5,6,7"}),
        ({}, {}),
    ],
)
def test_a_program_of_a_gang_gets_the_gpus_of_the_gang(worker: dict[str, str], program: dict[str, str]) -> None:
    assert restrict_program(worker, "4,5,6,7") == program
    assert restrict_program(worker, "") == {}


def test_gangs_share_no_gpu_if_a_trainer_resets_hip_visible_devices() -> None:
    """As `runner/helpers/envs/base_env.sh` of Primus does."""
    gpus = []
    for devices in ("0,1,2,3", "4,5,6,7"):
        program = restrict_program({HIP: devices[0]}, devices) | {HIP: "0,1,2,3"}
        gpus += select(program[ROCR], program[HIP]).split(",")
    assert sorted(gpus) == [str(number) for number in range(8)]


def test_a_worker_below_a_remaining_rocr_variable_restricts_within_it() -> None:
    program = restrict_program({ROCR: "4,5,6,7", HIP: "2"}, "2,3")
    assert program == {ROCR: "6,7", HIP: "0,1"}
