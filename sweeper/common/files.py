"""Write files atomically."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file next to its place and move it there, so that a process that is killed leaves the earlier one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)
