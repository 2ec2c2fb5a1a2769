"""Python objects between a process and its fork, with tensors in memory that is handed over instead of copied.

Each message is a file in memory (memfd) whose descriptor travels over a socket pair. It needs nothing of /dev/shm,
which is 64 MB in a container by default, and the receiver maps it without reading it. Pickle is used between a
process and its own fork only, never on what comes from a disk or a network.
"""

import os
import pickle
import socket
import struct
from collections.abc import Callable
from io import BytesIO
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

_HEADER = struct.Struct("qq")
_ALIGNMENT = 64
_SMALL_BYTES = 2048


class Channel:
    """One end of a pair. `receive` raises EOFError once the other end is closed and all was received."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def send(self, value: Any) -> None:
        """Hand over a value. Writes it into memory once; waits for nobody."""
        buffers: list[pickle.PickleBuffer] = []
        body = _dumps(value, buffers)
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        sizes = np.array([part.nbytes for part in parts], dtype=np.int64)
        descriptor = os.memfd_create("shoal-batch", os.MFD_CLOEXEC)
        try:
            total = _write_parts(descriptor, [memoryview(sizes.tobytes()), *parts])
            socket.send_fds(self._socket, [_HEADER.pack(len(parts), total)], [descriptor])
        finally:
            os.close(descriptor)

    def receive(self) -> Any:
        """The next value; its tensors live in the memory that was handed over and may be written to."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        if not header:
            raise EOFError("the other end is closed")
        num_parts, total = _HEADER.unpack(header)
        try:
            memory = _map(descriptors[0], total)
        finally:
            os.close(descriptors[0])
        body, *buffers = _read_parts(memory, num_parts)
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        self._socket.close()


def _map(descriptor: int, total: int) -> memoryview:
    """The whole file as memory. Python's own mmap would hold a descriptor for as long as a batch lives."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=total)
    memory: Any = torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, storage)).numpy()
    return memoryview(memory)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write_parts(descriptor: int, parts: list[memoryview]) -> int:
    """Write each part at the next boundary; the size of it all. `write` is faster here than mapping fresh pages."""
    offset = 0
    for part in parts:
        offset = _aligned(offset)
        while part.nbytes:
            written = os.pwrite(descriptor, part, offset)
            offset, part = offset + written, part[written:]
    os.ftruncate(descriptor, offset)
    return offset


def _read_parts(memory: memoryview, num_parts: int) -> list[memoryview]:
    sizes = np.frombuffer(memory, np.int64, num_parts).tolist()
    parts, offset = [], 8 * num_parts
    for size in sizes:
        offset = _aligned(offset)
        parts.append(memory[offset : offset + size])
        offset += size
    return parts


def _dumps(value: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes <= _SMALL_BYTES:
            return True
        buffers.append(buffer)
        return False

    file = BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_inside).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Sends plain tensors as arrays of bytes, which pickle can leave where they are."""

    def reducer_override(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(memory: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).reshape(shape)
