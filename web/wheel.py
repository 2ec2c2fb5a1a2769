"""A wheel has the page of `shoal dash` inside: built here where it is missing, or older than its sources."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the page with npm. Where there is none, the wheel gets the page as it is, or none, and that is said."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        page = root / "src/shoal/dash/page/index.html"
        if version == "editable" or _is_new(page, root / "web"):
            return
        if shutil.which("npm") is None:
            trouble = (
                "its page of `shoal dash` is older than web/" if page.exists() else "it has no page of `shoal dash`"
            )
            self.app.display_warning(
                f"There is no npm to build the page with. This wheel can be used, but {trouble}."
            )
            return
        for command in (["npm", "ci", "--ignore-scripts", "--loglevel=error"], ["npm", "run", "--silent", "build"]):
            subprocess.run(command, cwd=root / "web", check=True)


def _is_new(page: Path, web: Path) -> bool:
    """Whether nothing it is made of has changed since the page was built; what `make page` goes by."""
    sources = [web / "package-lock.json", web / "build.mjs", *(web / "src").iterdir()]
    return page.exists() and page.stat().st_mtime >= max(source.stat().st_mtime for source in sources)
