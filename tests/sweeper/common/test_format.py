"""Tests of the number format."""

import math

import pytest

from sweeper.common.format import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.001234567, "0.001235"),
        (98.76543, "98.77"),
        (-999.94, "-999.9"),
        (1000.4, "1,000"),
        (-1234567.8, "-1,234,568"),
        (math.nan, ""),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_significant_digits_or_thousands_separators(value: float, text: str) -> None:
    assert format_number(value) == text
