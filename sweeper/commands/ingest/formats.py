"""The supported files and how each is read. A value that a file does not contain stays unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sweeper.commands.ingest.imported import ImportedResult
from sweeper.commands.ingest.logs import is_log, read_log
from sweeper.commands.ingest.ml_dataflow import is_ml_dataflow, read_ml_dataflow
from sweeper.commands.ingest.tprimat import is_tprimat, read_tprimat
from workloads.api.errors import UserInputError

HEAD_BYTES = 8192  # of a file, by which its format is recognised


@dataclass(frozen=True)
class Format:
    """A supported file format.

    Attributes:
        recognises: takes a path and the first `HEAD_BYTES` of its text; returns whether the file has this format.
        read: yields the results of a file.
    """

    name: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path], Iterator[ImportedResult]]


def detect_format(path: Path) -> Format:
    """Return the format of a file.

    Raises:
        UserInputError: the file cannot be opened, is empty, is not text or has no supported format.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UserInputError(f"{path}: {error.strerror}") from error
    if not head.strip():
        raise UserInputError(f"{path}: is empty")
    try:
        text = head.decode(errors="strict" if len(head) < HEAD_BYTES else "ignore")
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: is not text (byte {error.start})") from error
    if "\0" in text:
        raise UserInputError(f"{path}: is not text (a zero byte)")
    for file_format in FORMATS:
        if file_format.recognises(path, text):
            return file_format
    supported = "; ".join(file_format.name for file_format in FORMATS)
    raise UserInputError(f"{path}: unknown format. Supported: {supported}")


FORMATS = (
    Format("tprimat benchmark (JSON)", is_tprimat, read_tprimat),
    Format("ml_dataflow results (CSV of 19 or 21 numbers a line)", is_ml_dataflow, read_ml_dataflow),
    Format(
        "log of Megatron-LM, Megatron-DeepSpeed, Primus, Megatron-Bridge, NeMo or torchtitan",
        lambda path, _: is_log(path),
        read_log,
    ),
)
