"""A trial's process group. The group is destroyed after the trial, while the workers continue to run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from workloads.api.contract import Rank
from workloads.instruments.torch_internals import forget_process_groups

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600.0  # timeout of a collective; if a rank fails, the driver ends the trial long before this timeout


@contextmanager
def process_group(rank: Rank, device: torch.device) -> Iterator[None]:
    """Create this trial's default process group: NCCL or RCCL between GPUs, gloo between CPUs."""
    if dist.is_initialized():  # a failed trial of this process initialized it
        dist.destroy_process_group()
        forget_process_groups()
    alone = rank.world_size == 1
    store: dist.Store = dist.HashStore() if alone else _store_at(rank.rendezvous, rank.rank == 0, rank.world_size)
    dist.init_process_group(
        backend="cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"trial {rank.sequence_number}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
        # No device_id: with one, torch 2.11 splits meshes off this group and ends the process at its second group.
    )
    try:
        yield
    except BaseException:
        # Destroying a GPU group waits for the other ranks, which may wait for this rank. The driver ends the gang.
        if alone:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    forget_process_groups()  # otherwise a cache would give the next trial this trial's groups


@cache
def _store_at(rendezvous: str, listens: bool, world_size: int) -> dist.Store:
    """Return the gang's store. The store stays open for all trials, because a second store could not reuse the port."""
    host, _, port = rendezvous.rpartition(":")
    if host == LOOPBACK:  # on a single node, nothing listens on the network
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # Without its own socket, the store would listen on every interface.
    listening = socket.create_server((host, int(port))).detach() if listens else None
    return dist.TCPStore(
        host,
        int(port),
        world_size,
        is_master=listens,
        wait_for_workers=False,
        timeout=timedelta(seconds=120),
        master_listen_fd=listening,
    )
