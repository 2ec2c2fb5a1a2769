"""Values on their way between processes: pickles, with large arrays beside them in memory that is mapped, not copied.

Pickle is used because functions and arbitrary values cannot be sent otherwise. The bytes are written by this process
or by workers it started itself, and travel through descriptors that only they hold.
"""

import copyreg
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shoal.spec.errors import UserError

LARGE_BYTES = 1 << 18
"""Buffers from this size on travel in memory of their own."""
_ALIGN = 64
_PLAIN = frozenset((int, float, bool, str, type(None)))
"""Types whose values need no care: there may be millions of them."""


class Packed(NamedTuple):
    """A value as bytes. Large buffers of it lie in the memory `fd` (-1: none) at `spans`, as (start, size).

    Whoever has it closes `fd` when it is not needed any more.
    """

    data: bytes
    spans: tuple[tuple[int, int], ...] = ()
    fd: int = -1

    @property
    def num_bytes(self) -> int:
        return len(self.data) + (sum(size for _, size in self.spans) if self.spans else 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def pack(value: Any) -> Packed:
    """A value as it can be sent. Raises whatever pickling raises."""
    if type(value) in _PLAIN:
        return Packed(pickle.dumps(value, 5))
    large: list[pickle.PickleBuffer] = []

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        is_small = memoryview(buffer).nbytes < LARGE_BYTES
        if not is_small:
            large.append(buffer)
        return is_small

    try:
        data = _dump(value, keep_small)
        # By name, others would look for it in a program that they have not run.
        is_whole = b"__main__" not in data
    except Exception:
        is_whole = False
    if not is_whole:
        large.clear()
        data = _dump_by_value(value, keep_small)
    return Packed(data, *_lay_out(large)) if large else Packed(data)


def _dump(value: Any, keep_small: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    if "torch" not in sys.modules:
        return pickle.dumps(value, protocol=5, buffer_callback=keep_small)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=keep_small)
    pickler.dispatch_table = copyreg.dispatch_table | _tensors()
    pickler.dump(value)
    return file.getvalue()


def _dump_by_value(value: Any, keep_small: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=keep_small))


def _tensors() -> dict[type, Callable[[Any], Any]]:
    """How plain tensors are taken apart: torch's own way writes an archive of each, at fifty times the cost."""
    torch = sys.modules["torch"]

    def take_apart(tensor: Any) -> Any:
        is_plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            return tensor.__reduce_ex__(5)
        flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
        return _put_together, (flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    return {torch.Tensor: take_apart}


def _put_together(flat: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    # A small one came inside the pickle, where it cannot be written to.
    flat = flat if flat.flags.writeable else flat.copy()
    return torch.from_numpy(flat).view(getattr(torch, dtype)).view(shape)


def _lay_out(buffers: Sequence[pickle.PickleBuffer]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Copy buffers into new memory: where each is, and the memory."""
    spans, end = [], 0
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        spans.append((end, size))
        end += -(-size // _ALIGN) * _ALIGN
    fd = os.memfd_create("shoal-item") if hasattr(os, "memfd_create") else _nameless_file()
    try:
        os.ftruncate(fd, end)
        for buffer, (start, _) in zip(buffers, spans, strict=True):
            rest = buffer.raw()
            while rest:
                written = os.pwrite(fd, rest, start)
                rest, start = rest[written:], start + written
    except BaseException:
        os.close(fd)
        raise
    return tuple(spans), fd


def _nameless_file() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def unpack(packed: Packed) -> Any:
    """The value again. Large arrays keep the memory they came in; it goes when the last of them does."""
    if packed.fd < 0:
        return pickle.loads(packed.data)
    whole = memoryview(mmap.mmap(packed.fd, 0))
    return pickle.loads(packed.data, buffers=[whole[start : start + size] for start, size in packed.spans])


def cannot_send(what: str, error: BaseException) -> UserError:
    """The error for something that cannot be pickled."""
    hint = "send plain values, arrays or tensors; open files, locks and connections inside the function"
    return UserError(f"{what} cannot be sent.", why=f"{type(error).__name__}: {error}", hint=hint)
