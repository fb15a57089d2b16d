"""What decides how the pictures look: they are to be drawn again where it has changed (`make pictures`)."""

import ast
import hashlib
import io
import tokenize
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURES = REPOSITORY / "docs/pictures"
DIGESTS = PICTURES / "sources.json"
# The files that decide what a kind of picture shows. `tests/test_docs.py` fails where one has changed since.
SOURCES = {
    "accept": ["sweeper/commands/accept/page.py", "sweeper/pages/html_page.py", "sweeper/pages/page.*"],
    "report": ["sweeper/commands/report/*.py", "sweeper/pages/html_page.py", "sweeper/pages/page.*"],
    "plan": ["sweeper/commands/plan/page.py", "sweeper/commands/plan/text.py", "sweeper/pages/page.*"],
    "mlflow": ["sweeper/tracking/mlflow_view.py", "sweeper/tracking/shown_metrics.py"],
    "sweep": [f"sweeper/pages/{name}.py" for name in ("plan_view", "progress", "summary", "trial_tables")],
}


def digest_sources() -> dict[str, str]:
    """Return a digest of the sources of each kind of picture: of Python what runs, without comments and docstrings."""
    return {
        kind: hashlib.sha256(b"".join(_read_source(path) for file in files for path in sorted(REPOSITORY.glob(file))))
        .hexdigest()[:16]
        for kind, files in SOURCES.items()
    }  # fmt: skip


def _read_source(path: Path) -> bytes:
    text = path.read_text()
    if path.suffix != ".py":
        return text.encode()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for number in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[number] = ""
    return "\n".join(filter(None, lines)).encode()
