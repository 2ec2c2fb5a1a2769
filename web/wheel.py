"""A wheel has the page of `shoal dash` inside: built here where `make page` was not called before."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the page with npm. Where there is none, a wheel is built without it, and that is said."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or (root / "src/shoal/dash/page/index.html").exists():
            return
        if shutil.which("npm") is None:
            self.app.display_warning("There is no npm: this wheel will not have the page of `shoal dash`.")
            return
        for command in (["npm", "ci", "--ignore-scripts", "--loglevel=error"], ["npm", "run", "--silent", "build"]):
            subprocess.run(command, cwd=root / "web", check=True)
