"""Fixtures of the tests that train: processes without and with GPUs, and what one process trains."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.parallel_ranks import Ranks, Trained, draw_batch, train_in_one_process

RANKS = 8


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(RANKS)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def reference() -> Trained:
    return train_in_one_process(draw_batch())


@pytest.fixture(scope="package")
def gpus() -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()
