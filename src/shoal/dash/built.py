"""The files of the page, as `make page` built them: read once, kept compressed."""

import gzip
import os
from dataclasses import dataclass

FOLDER = os.path.join(os.path.dirname(__file__), "page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file. Names carry a digest of the content, `index.html` aside: browsers may keep them for good."""

    body: bytes
    compressed: bytes
    type: str


def is_built(folder: str = FOLDER) -> bool:
    """Whether the page is there."""
    return os.path.exists(os.path.join(folder, "index.html"))


def read_page(folder: str = FOLDER) -> dict[str, PageFile]:
    """All files of a page that is built, by name."""
    files = {}
    for name in sorted(os.listdir(folder)):
        kind = _TYPES.get(os.path.splitext(name)[1])
        if kind:
            with open(os.path.join(folder, name), "rb") as file:
                body = file.read()
            files[name] = PageFile(body=body, compressed=gzip.compress(body, 9, mtime=0), type=kind)
    return files
