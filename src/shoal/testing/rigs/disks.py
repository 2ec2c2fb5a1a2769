"""Disks that are small, full, read-only, or lose their power."""

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.spec.errors import UserError
from shoal.spec.fault import RIG
from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import call, require
from shoal.testing.rigs.processes import stopped
from shoal.train.rigged import fill_disk

_TRIES = 100
_SHUTDOWN, _WITHOUT_FLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH


class SmallDisk:
    """A disk of a few MiB, mounted at `path`. Made by `small_disk`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, mebibytes: float | None = None) -> None:
        """Use up so much, or all that is left."""
        fill_disk(str(self.path), mebibytes)

    def free(self) -> None:
        """Give back what `fill` and the fault `disk_full` took."""
        for filler in self.path.glob(f"{RIG}filler-*"):
            filler.unlink(missing_ok=True)

    def read_only(self) -> None:
        """Let every change fail (EROFS). The kernel refuses while a file there is open for writing."""
        self._remount("ro")

    def writable(self) -> None:
        """Undo `read_only`."""
        self._remount("rw")

    def _remount(self, how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(
                f"The disk at {self.path} cannot be made {'read-only' if how == 'ro' else 'writable'} now.",
                why=done.stderr.strip(),
                hint="close the files that are open for writing there, or let calls fail with `failing_syscalls`",
            )


@contextmanager
def small_disk(mebibytes: float) -> Iterator[SmallDisk]:
    """A disk of this size, in memory. Needs root."""
    _check_size(mebibytes)
    require("rigs.small_disk", "root", "mount", "mounting")
    with leftovers.rig_folder() as folder:
        path = folder / "disk"
        path.mkdir()
        size = f"size={int(mebibytes * 1024)}k,mode=777"
        # The name of the source marks it as one that may be filled.
        call("mount", "-t", "tmpfs", "-o", size, folder.name, str(path), rig="rigs.small_disk")
        yield SmallDisk(path)


class PowerLossDisk:
    """An ext4 file system at `path`, of which can be seen what had reached the disk. Made by `power_loss_disk`.

    The page cache outlives any process, so killing a writer shows nothing about durability; only this does.
    """

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        self._image = image
        name = os.path.basename(
            subprocess.check_output(["losetup", "-nO", "NAME", "-j", str(image)], text=True).strip()
        )
        self._counts = Path("/sys/block", name, "stat")
        self._num_snapshots = 0

    def fail(self) -> None:
        """Break the disk for good: from now on every read and write of it fails (EIO), also of open files."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(folder)

    @contextmanager
    def snapshot(self, writers: Sequence[int] = ()) -> Iterator[Path]:
        """What would be left if the power failed now, mounted; its journal is replayed, as after a crash.

        The processes `writers` are stopped while the image is copied, and go on afterwards. The copy is taken again
        until nothing was written meanwhile: a torn one would show what no power loss does.
        """
        self._num_snapshots += 1
        copy = self._image.with_name(f"copy-{self._num_snapshots}.img")
        place = self._image.with_name(f"copy-{self._num_snapshots}")
        with ExitStack() as stack:
            with stopped(writers):
                self._copy(copy)
            stack.callback(copy.unlink)
            stack.enter_context(_mounted_image(copy, place))
            yield place

    def _copy(self, copy: Path) -> None:
        for _ in range(_TRIES):
            before = self._num_writes()
            shutil.copyfile(self._image, copy)
            if self._num_writes() == before:
                return
            time.sleep(0.01)
        copy.unlink()
        raise UserError(
            "The disk was written to all the time, so its image could not be copied whole.",
            hint="name the processes that write: `snapshot(writers=[pid])`",
        )

    def _num_writes(self) -> tuple[str, ...]:
        """Writes that were finished, and those in flight: fields 5 and 9 of the kernel's statistics of a disk."""
        fields = self._counts.read_text().split()
        return fields[4], fields[8]


@contextmanager
def power_loss_disk(mebibytes: int = 32) -> Iterator[PowerLossDisk]:
    """An ext4 disk whose power can fail. Its image is kept in memory. Needs root, e2fsprogs and loop devices."""
    _check_size(mebibytes)
    require("rigs.power_loss_disk", "root", "mount", "mounting", "mkfs.ext4", "loop devices")
    with leftovers.rig_folder("/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        image, path = folder / "disk.img", folder / "disk"
        with open(image, "wb") as file:
            file.truncate(int(mebibytes) << 20)
        call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        with _mounted_image(image, path):
            yield PowerLossDisk(path, image)


@contextmanager
def _mounted_image(image: Path, path: Path) -> Iterator[None]:
    path.mkdir()
    call("mount", "-o", "loop", str(image), str(path), rig="rigs.power_loss_disk")
    try:
        yield
    finally:
        call("umount", str(path), is_checked=False)


def _check_size(mebibytes: float) -> None:
    if not 0 < mebibytes <= 4096:
        raise UserError(f"A disk of {mebibytes} MiB cannot be made.", hint="give a size from a few KiB to 4096 MiB")
