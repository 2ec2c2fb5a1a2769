"""A copy of the state at the moment of a save, so that training may go on while it is written."""

from collections.abc import Mapping, Sequence

import torch

from shoal.checkpoint.layout import FilePlan, TensorEntry
from shoal.checkpoint.state import TORCH_DTYPES


class Staging:
    """One buffer, reused from save to save, in which tensors lie exactly as their files will hold them.

    It costs as much memory as the state it holds, and one copy of the state per save: the only time training stops
    for a checkpoint. The first save also pays for fresh memory. A buffer that has become far too large is let go.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, plans: Sequence[FilePlan], tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
        """Copy the tensors in; returns the data of each file, valid until the next call.

        Raises MemoryError if there is no memory for the buffer.
        """
        on_device = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._fit(sum(_aligned(plan.data_bytes) for plan in plans), pinned=bool(on_device))
        views, start = [], 0
        for plan in plans:
            end = start + plan.data_bytes
            _fill(self._buffer[start:end], plan.tensors, tensors)
            views.append(self._buffer[start:end].numpy().data)
            start = _aligned(end)
        for device in on_device:
            torch.cuda.synchronize(device)
        return views

    def _fit(self, num_bytes: int, pinned: bool) -> None:
        if num_bytes <= len(self._buffer) <= 2 * num_bytes and (self._buffer.is_pinned() or not pinned):
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
        try:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:  # how torch says that there is no memory
            raise MemoryError(f"no memory for a copy of {num_bytes:,} bytes") from error


def _aligned(num_bytes: int) -> int:
    """Rounded up to a multiple of eight, the width of the widest type."""
    return num_bytes + -num_bytes % 8


def _fill(data: torch.Tensor, entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> None:
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        source = tensors[entry.name].detach()
        target = data[start:end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
        target.copy_(source, non_blocking=source.is_cuda)  # `copy` waits for all of them at the end
        start = end
