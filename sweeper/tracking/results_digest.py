"""The digest of a sweep's results: what a store has of a finished sweep is not written again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeper.execution import code_probe

PACKAGE = Path(__file__).resolve().parent.parent


def compute_digest(results: Mapping[str, Any]) -> str:
    """Return the digest of plain values that stand for all results of a sweep, and of the code that presents them.

    So a version whose tables, plots or report differ writes them again.
    """
    text = json.dumps(results, sort_keys=True, default=str)
    return hashlib.sha256(f"{code_probe.digest([PACKAGE])} {text}".encode()).hexdigest()[:32]
