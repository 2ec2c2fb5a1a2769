"""What rigs need of a machine: root, tools, parts of the kernel. And what to do where it is missing."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shoal.engine import cgroups
from shoal.spec.errors import UserError

LACKS = "this machine lacks"
"""How the reasons of tests begin that are skipped for want of something."""


class RigMissing(UserError):
    """This machine cannot have the rig. `why` says what is missing and `hint` how to get it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something a rig needs. `find` returns why it is not there, or nothing where it is."""

    find: Callable[[], str]
    hint: str


def _tool(name: str, package: str) -> Need:
    def find() -> str:
        return "" if shutil.which(name) else f"there is no program `{name}`"

    return Need(find, f"`apt-get install {package}`, or what your system calls it")


def _works(*command: str) -> Callable[[], str]:
    def find() -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{' '.join(command)}` failed: {error}"
        return "" if done.returncode == 0 else f"`{' '.join(command)}` failed: {done.stderr.strip()[:200]}"

    return find


def _cgroup(controller: str) -> Need:
    def find() -> str:
        return "" if cgroups.find_parent(controller) else f"no control group for {controller} can be made here"

    return Need(find, "run as root where /sys/fs/cgroup is mounted writable (in a container: `--privileged`)")


def _package(name: str, how: str) -> Need:
    def find() -> str:
        return "" if importlib.util.find_spec(name) else f"the package {name} is not installed"

    return Need(find, f"`pip install {how}`")


def _is_there(path: str) -> Callable[[], str]:
    return lambda: "" if os.path.exists(path) else f"there is no {path}"


_DASH = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "dash", "page")
AXE = os.path.join(_DASH, *[os.pardir] * 4, "web", "node_modules", "axe-core", "axe.min.js")
_PRIVILEGED = "run as root; in a container, start it with `--privileged`"

NEEDS = {
    "root": Need(lambda: "" if os.geteuid() == 0 else "you are not root", _PRIVILEGED),
    "ip": _tool("ip", "iproute2"),
    "tc": _tool("tc", "iproute2"),
    "nsenter": _tool("nsenter", "util-linux"),
    "mount": _tool("mount", "mount"),
    "gcc": _tool("gcc", "gcc libc6-dev"),
    "setpriv": _tool("setpriv", "util-linux"),
    "swift-proxy-server": _tool("swift-proxy-server", "swift-proxy swift-account swift-container swift-object"),
    "mkfs.ext4": _tool("mkfs.ext4", "e2fsprogs"),
    "mpirun": _tool("mpirun", "openmpi-bin"),
    "slurmctld": _tool("slurmctld", "slurm-wlm"),
    "munged": _tool("munged", "munge"),
    "npm": _tool("npm", "npm"),
    "openssl": _tool("openssl", "openssl"),
    "prometheus": _tool("prometheus", "prometheus"),
    "victoria-metrics": _tool("victoria-metrics", "victoria-metrics"),
    "network namespaces": Need(_works("unshare", "--net", "true"), _PRIVILEGED),
    "mounting": Need(_works("unshare", "--mount", "true"), _PRIVILEGED),
    "tun devices": Need(_is_there("/dev/net/tun"), "load the kernel's `tun` module"),
    "loop devices": Need(_is_there("/dev/loop-control"), "load the kernel's `loop` module"),
    "strace": Need(
        _works("strace", "-qq", "-o", "/dev/null", "true"), "`apt-get install strace`, and allow tracing (ptrace)"
    ),
    "memory cgroups": _cgroup("memory"),
    "cpu cgroups": _cgroup("cpu"),
    "freezer cgroups": _cgroup("freezer"),
    "libfaketime": _package("libfaketime", "libfaketime"),
    "chromium": _tool("chromium", "chromium"),
    "playwright": _package("playwright", "playwright"),
    "the page": Need(
        lambda: "" if os.path.exists(os.path.join(_DASH, "index.html")) else "the page of `shoal dash` is not built",
        "`make page`, which needs npm",
    ),
    "axe-core": Need(_is_there(AXE), "`make page`, which needs npm"),
    "java": _tool("java", "default-jre-headless"),
    "mpi4py": _package("mpi4py", "'shoal[mpi]'"),
    "pyspark": _package("pyspark", "'shoal[spark]'"),
    "ray": _package("ray", "'shoal[ray]'"),
}


@cache
def _find(name: str) -> str:
    return NEEDS[name].find()


def require(rig: str, *names: str) -> None:
    """Raise RigMissing for the first of these that the machine lacks."""
    for name in names:
        if why := _find(name):
            raise RigMissing(f"{rig} is not possible here: {LACKS} {name}.", why=why, hint=NEEDS[name].hint)


def needs(*names: str) -> Any:
    """A mark for tests: skipped where the machine lacks one of these, with the reason said."""
    import pytest

    missing = [name for name in names if _find(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{LACKS} {', '.join(missing)}")


def call(*command: str, rig: str = "the rig", is_checked: bool = True) -> str:
    """Run a system tool. Where it refuses, the kernel lacks something: RigMissing with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if is_checked and done.returncode != 0:
        raise RigMissing(
            f"{rig} is not possible here: `{' '.join(command)}` failed.",
            why=(done.stderr or done.stdout).strip()[:400],
            hint="the kernel may lack what it needs; a newer one, or another machine, may have it",
        )
    return done.stdout


def call_each(*commands: Sequence[str], rig: str) -> None:
    for command in commands:
        call(*command, rig=rig)
