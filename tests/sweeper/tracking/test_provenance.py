"""The digest of results and code."""

import math
from pathlib import Path

import pytest

from sweeper.tracking import provenance
from sweeper.tracking.provenance import compute_digest


def test_the_digest_follows_the_results_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables.py").write_text("WIDTH = 80")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    first = compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 3})
    assert compute_digest({"written": 3, "metrics": {"gap": math.nan, "best": 1.5}}) == first
    assert compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 4}) != first
    (tmp_path / "tables.py").write_text("WIDTH = 90")
    assert compute_digest({"metrics": {"best": 1.5, "gap": math.nan}, "written": 3}) != first
