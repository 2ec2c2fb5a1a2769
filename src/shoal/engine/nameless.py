"""Files without a name: memory that only those have who inherit its descriptor."""

import os


def make_file(name: str, data: bytes = b"") -> int:
    """A descriptor of a new file with this in it. `name` is what /proc shows."""
    fd = os.memfd_create(name) if hasattr(os, "memfd_create") else _unlinked()
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked() -> int:
    import tempfile

    # Has no name from the start, or loses it before anyone can use it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_file(fd: int) -> bytes:
    """Everything in it, whatever position anybody has left it at."""
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)
