"""Files of a cluster under SHOAL_HOME: secrets and what is known, for the owner's eyes only."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from shoal.engine.clusters import Cluster, state_of
from shoal.spec.errors import UserError


def make_folder(folder: str) -> None:
    """Make sure that there is a folder that nobody else can look into."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.stat(folder).st_uid != os.geteuid():
            raise PermissionError(13, "it belongs to somebody else")
        os.chmod(folder, 0o700)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be used.", why=error.strerror or str(error), hint="set SHOAL_HOME to a folder of yours"
        ) from None


def write_private(folder: str, name: str, content: bytes | str) -> None:
    """Write a file that only its owner reads; it is whole or not there, even after a crash."""
    path = os.path.join(folder, name)
    draft = f"{path}.{os.getpid()}.new"
    data = content.encode() if isinstance(content, str) else content
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise UserError(f"{path} cannot be written.", why=error.strerror or str(error)) from None


def read_private(folder: str, name: str) -> bytes:
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read.",
            why=error.strerror or str(error),
            hint=f"remove {folder} and begin anew with `shoal up --cluster` or `shoal join`",
        ) from None


def write_cluster(cluster: Cluster) -> None:
    write_private(cluster.folder, *state_of(cluster))


def forget(cluster: Cluster) -> None:
    """Remove the secrets and everything that Ray wrote."""
    shutil.rmtree(cluster.folder, ignore_errors=True)
    shutil.rmtree(cluster.temp_dir, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: str, name: str, *, waits: bool) -> Iterator[None]:
    """Hold a lock that ends with the process. Where it does not wait, somebody else's is an error."""
    make_folder(folder)
    with open(os.path.join(folder, name), "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "Another `shoal up`, `join`, `leave` or `down` is at work on this machine.",
                hint="wait until it is done",
            ) from None
        yield
