"""What has to be the same on every machine of a cluster, and what to do where it is not."""

import platform
from collections.abc import Mapping

from shoal.spec.errors import UserError
from shoal.version import __version__

NONE = "none"


def versions_here() -> dict[str, str]:
    """The versions of this machine; nothing is imported to find them."""
    return {
        "python": platform.python_version(),
        "shoal": __version__,
        "ray": _installed("ray"),
        "torch": _installed("torch"),
    }


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return NONE


def require_ray() -> None:
    """Raise UserError where Ray, or what comes with it, is not installed."""
    for package in ("ray", "cryptography"):
        if _installed(package) == NONE:
            raise UserError(
                f"{package.capitalize()} is not installed.",
                why="a cluster of machines is held together by Ray",
                hint="run `pip install 'shoal[ray]'`",
            )


def differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The names of what is too different for the machines to work together.

    Ray speaks only to the same Ray, and Python of another minor version unpickles what it likes. Of torch the build
    may differ (`+cpu`, `+cu130`), so that machines with and without a GPU go together.
    """
    return [name for name in here if _essence(name, here[name]) != _essence(name, there.get(name, NONE))]


def _essence(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def check_versions(here: Mapping[str, str], there: Mapping[str, str], head: str) -> None:
    """Raise UserError where machines differ, naming both sides."""
    wrong = differing(here, there)
    if not wrong:
        return
    told = [f"{name} is {here[name]} here and {there.get(name, NONE)} on {head}" for name in wrong]
    wanted = [
        f"{'ray[default]' if name == 'ray' else name}=={there[name].partition('+')[0]}"
        for name in wrong
        if name not in ("python", "shoal") and there.get(name, NONE) != NONE
    ]
    hints = []
    if "python" in wrong:
        hints.append(f"make an environment with Python {_essence('python', there.get('python', NONE))}")
    if "shoal" in wrong and there.get("shoal", NONE) != NONE:
        hints.append(f"install shoal {there['shoal']} here, from where {head} has it")
    if wanted:
        hints.append("here: `pip install " + " ".join(f"'{each}'" for each in wanted) + "`")
    if any(there.get(name, NONE) == NONE for name in wrong):
        hints.append(f"install on {head} what it lacks")
    raise UserError("This machine has other versions than the cluster.", why="; ".join(told), hint="; ".join(hints))
