"""A process group for the length of a trial, over workers that live longer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from workloads.api.contract import Rank

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600.0  # of a collective; a rank that fails ends the trial through the driver, long before


@contextmanager
def process_group(rank: Rank, device: torch.device) -> Iterator[None]:
    """The default process group of this trial: NCCL or RCCL between GPUs, gloo between processors."""
    store: dist.Store = dist.HashStore() if rank.world_size == 1 else _store(rank)
    dist.init_process_group(
        backend="cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"trial {rank.sequence_number}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
        # No device_id: meshes would then be split off this group, which in a process's second one ends it (2.11).
    )
    try:
        yield
    except BaseException:
        # The others may be waiting for this rank, and ending a group of GPUs waits for them. The driver ends the gang.
        if rank.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    if hasattr(debug, "_clear_sharding_prop_cache"):  # or the next trial is handed this one's groups
        debug._clear_sharding_prop_cache()


def _store(rank: Rank) -> dist.Store:
    return _store_at(rank.rendezvous, rank.rank == 0, rank.world_size)


@cache
def _store_at(rendezvous: str, listens: bool, world_size: int) -> dist.Store:
    """Kept open for all trials of the gang: a second one could not listen at the same place at once."""
    host, _, port = rendezvous.rpartition(":")
    if host == LOOPBACK:  # one node: nothing is to be reached from outside
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # By itself the store would listen on every interface.
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
