"""Command workloads over two nodes, each with its own address and host name."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.conftest import CommandResult, find_processes
from tests.support.virtual_cluster import GPUS, NodeWorkspace

pytestmark = pytest.mark.soak
NODES = ("first", "second")
# Joins the process group, writes its environment to a file, and then ends as `behaviour` requires.
TRAINER = """
import json, os, socket, sys, time
import torch, torch.distributed as dist
folder, behaviour = sys.argv[1:]
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
rank = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")}
rank |= {"rank": dist.get_rank(), "total": total.item(), "node": socket.gethostname(), "parent": os.getppid()}
rank |= {"devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""), "algorithm": os.environ.get("NCCL_ALGO", "")}
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
    json.dump(rank, file)
dist.barrier()
if behaviour == "fail" and dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("out of luck on " + socket.gethostname())
for _ in range(600 if behaviour == "hang" else 0):
    print("still here on", socket.gethostname(), flush=True)
    time.sleep(1)
for _ in range(20):
    dist.barrier()
    if dist.get_rank() == 0:
        print("took 0.01", flush=True)
"""
TORCHRUN = ["{python}", "-m", "torch.distributed.run", "--nnodes={nodes}", "--node-rank={node_rank}"]
TORCHRUN += ["--nproc-per-node={gpus_per_node}", "--master-addr={master_address}", "--master-port={master_port}"]
PYTHON = ["{python}"]
TRAINER_COMMAND = ["trainer.py", "{folder}", "{behaviour}"]


def run_trainer(head: NodeWorkspace, launcher: list[str], behaviour: str, *overrides: str) -> CommandResult:
    """Run a sweep of one trial on all four GPUs, and check that it leaves no process on either node."""
    sweep = [f"command.run={[*launcher, *TRAINER_COMMAND]}", f"command.directory={head.path}"]
    sweep += [f"command.environment={{TEST_OF: '{head.path}'}}", "command.log={step_time_s: 'took ([0-9.]+)'}"]
    sweep += [f"space.folder='{head.path}'", f"space.behaviour={behaviour}", "command.global_batch='8'"]
    sweep += ["command.sequence_length='128'", "workload=command", "gpus=4", "budget.trials=1"]
    (head.path / "trainer.py").write_text(TRAINER)
    result = head.sweep(*sweep, *overrides)
    assert not find_processes("TEST_OF", str(head.path))
    return result


def read_ranks(head: NodeWorkspace) -> list[dict[str, Any]]:
    """Return what each rank's trainer wrote."""
    return [json.loads((head.path / f"{rank}.json").read_text()) for rank in range(2 * GPUS)]


@pytest.mark.parametrize("start", ["node", "gpu"])
def test_the_ranks_of_two_nodes_join_one_process_group(head: NodeWorkspace, start: str) -> None:
    overrides = [f"command.start={start}", "space.env.NCCL_ALGO=Ring"]
    result = run_trainer(head, TORCHRUN if start == "node" else PYTHON, "ok", *overrides)
    assert result.code == 0, result.err
    ranks = read_ranks(head)
    assert [rank["total"] for rank in ranks] == [10.0] * 4
    assert [rank["algorithm"] for rank in ranks] == ["Ring"] * 4
    nodes = [rank["node"] for rank in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] and set(nodes) == set(NODES)
    assert {rank["MASTER_ADDR"] for rank in ranks} == {head.cluster.network.addresses[nodes[0]]}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    if start == "node":
        assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
        assert set(Counter(rank["parent"] for rank in ranks).values()) == {2}  # one launcher on each
        assert {rank["devices"] for rank in ranks} == {"0,1"}
    else:
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0"] * 4
        assert len({(rank["node"], rank["parent"]) for rank in ranks}) == 4  # each node counts its own processes
        assert [rank["devices"] for rank in ranks] == ["0", "1", "0", "1"]
    (trial,) = head.runs("trial")
    assert trial.data.metrics["step_time_ms"] == 10 and trial.data.tags["node"] == nodes[0]


def test_a_failure_on_one_node_ends_the_programs_of_both_and_is_reported(head: NodeWorkspace) -> None:
    result = run_trainer(head, TORCHRUN, "fail")
    assert result.code == 1
    (trial,) = head.trials()
    record = trial.user_attrs["record"]
    failed_node = read_ranks(head)[-1]["node"]
    assert record["status"] == "failed" and "Error: " in record["reason"], record["reason"]
    assert f"rank {GPUS} on {failed_node}:" in record["detail"], record["detail"]
    assert f"ValueError: out of luck on {failed_node}" in record["detail"], record["detail"]


def test_a_trial_that_times_out_ends_on_both_nodes(head: NodeWorkspace) -> None:
    result = run_trainer(head, TORCHRUN, "hang", "trial.timeout_s=40")
    assert result.code == 1
    (trial,) = head.trials()
    record = trial.user_attrs["record"]
    assert record["status"] == "timed_out" and record["reason"] == "took longer than trial.timeout_s=40"
    assert all(f"still here on {node}" in record["detail"] for node in NODES), record["detail"]
