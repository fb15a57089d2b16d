"""Write files atomically."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file and move it to `path`. If the process is killed, the earlier file remains intact."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)
