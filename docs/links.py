"""MkDocs hook: files outside of docs/ that a page links, such as results of benchmarks, are part of the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)([^)]*\))")


def on_files(files: Files, config: Any) -> None:
    """Add every file that a page links, and what those files link. A link that leads nowhere stays, and is reported."""
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        uri = pages.pop()
        for link in LINK.findall((ROOT / path_of(uri)).read_text()):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path_of(uri)), link[1]))
            if (ROOT / path).is_file() and not files.get_file_from_path(uri_of(path)):
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
                pages += [path] if path.endswith(".md") else []


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page, which are relative to its place in the repository, to the places in the site."""
    folder = posixpath.dirname(path_of(page.file.src_uri))

    def move(link: re.Match[str]) -> str:
        uri = uri_of(posixpath.normpath(posixpath.join(folder, link[2])))
        return f"{link[1]}{posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{link[3]}"

    return LINK.sub(move, markdown)


def path_of(uri: str) -> str:
    """Return the path in the repository of a file of the site."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def uri_of(path: str) -> str:
    return path.removeprefix("docs/")
