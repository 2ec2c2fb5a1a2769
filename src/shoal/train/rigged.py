"""Disks and networks that a rig made for tests, as a worker sees and breaks them. Real ones are not touched."""

import contextlib
import errno
import fcntl
import math
import os
import socket
import struct
import time

from shoal.spec.fault import RIG


def rigged_disk(path: str) -> str | None:
    """Where the disk of `path` is mounted, if a rig made it; else None."""
    path, best = os.path.realpath(path), ("", "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            place, _, rest = line.partition(" - ")
            where = place.split()[4]
            source = rest.split()[1]
            # Of mounts in the same place the last one is what we see.
            if (path + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
                best = where, source
    is_rigged = best[1].startswith(RIG) or f"/{RIG}" in best[0]
    return best[0] if is_rigged else None


def fill_disk(folder: str, mebibytes: float | None = None) -> str:
    """Write a file into `folder` of so many MiB, or until nothing fits any more; returns its path."""
    path = os.path.join(folder, f"{RIG}filler-{os.getpid()}-{time.monotonic_ns()}")
    left = math.inf if mebibytes is None else int(mebibytes * (1 << 20))
    size = 1 << 20
    with open(path, "wb", buffering=0) as file:
        while left > 0 and size:
            try:
                left -= file.write(bytes(int(min(size, left))))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                size //= 2  # the last bytes too
    return path


def is_rigged_network() -> bool:
    """Whether this process is on a host of `rigs.hosts`."""
    mine = os.stat("/proc/self/ns/net")
    with contextlib.suppress(OSError):
        for entry in os.scandir("/run/netns"):
            if entry.name.startswith(RIG) and os.path.samestat(entry.stat(), mine):
                return True
    return False


def set_links(is_up: bool) -> None:
    """Set every network interface of this host but loopback up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            if name != "lo":
                request = bytearray(struct.pack("16sH14x", name.encode(), 0))
                fcntl.ioctl(control, 0x8913, request)  # SIOCGIFFLAGS
                flags = struct.unpack_from("16sH", request)[1]
                struct.pack_into("H", request, 16, flags | 1 if is_up else flags & ~1)  # IFF_UP
                fcntl.ioctl(control, 0x8914, bytes(request))  # SIOCSIFFLAGS
