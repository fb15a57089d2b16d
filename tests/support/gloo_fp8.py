"""fp8 over gloo in tests of layouts: gloo has no such data type, and sums of other orders round to other numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def fp8_over_gloo(*, exact_sums: bool) -> Iterator[None]:
    """Gather torchao's fp8 tensors as bytes.

    Args:
        exact_sums: round scales per tensor down to powers of two, as those per row are. Then products of fp8 numbers
            add up in fp32 without rounding, and the layout does not change a sum.
    """
    from torchao.float8 import float8_ops, float8_utils

    all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(float8_ops.FLOAT8_OPS_TABLE, all_gather, _all_gather_bytes)
        if exact_sums:
            scale = float8_utils.amax_to_scale
            patch.setattr(float8_utils, "amax_to_scale", lambda amax, dtype, *_, **__: scale(amax, dtype, True))
        yield


def _all_gather_bytes(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Tensor:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    tensor, *others = arguments
    gathered = operation(tensor._data.contiguous().view(torch.uint8), *others, **(keywords or {}))
    return Float8TrainingTensor(
        gathered.view(tensor._data.dtype),
        tensor._scale,
        tensor._orig_dtype,
        tensor._linear_mm_config,
        tensor._gemm_input_role,
    )
