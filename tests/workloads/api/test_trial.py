"""What counts as running out of memory."""

import pytest
import torch

from workloads.api.trial import is_out_of_memory
from workloads.command.process import OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("HIP error: out of memory\nHIP kernel errors might be reported later"), True),
        (RuntimeError("HIP error: invalid device function"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_both_vendors_messages_say_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("RuntimeError: HIP error: out of memory", True),
        ("HIP error: an illegal memory access was encountered", False),
    ],
)
def test_a_programs_line_says_that_memory_ran_out(line: str, expected: bool) -> None:
    assert bool(OUT_OF_MEMORY.search(line)) == expected
