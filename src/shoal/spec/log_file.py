"""How the parts of a log are called, for whoever writes and whoever reads them.

PATH is the newest. PATH.START is one that is full; START counts all bytes that the worker had printed before it.
"""

import re
from collections.abc import Iterable


def sealed_starts(names: Iterable[str], log_name: str) -> list[int]:
    """Where the parts of a log begin that are full, in order, from the names in its folder."""
    part = re.compile(re.escape(log_name) + r"\.(\d{1,18})")
    return sorted(int(match[1]) for name in names if (match := part.fullmatch(name)))
