"""A group in which this rank computes on a GPU and others do not: its tensors pass through main memory."""

from collections.abc import Sequence

import torch

from shoal.comm.group import DONE, CopiedWork, Group, Op, Work, check_parts, flatten


class StagedGroup:
    """Any group whose ranks move tensors in main memory, for a rank that has them elsewhere.

    Others need not know. Each call costs a copy there and one back, and waits for what the GPU was given before it.
    """

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.transport, self.reason = getattr(inner, "transport", ""), getattr(inner, "reason", "")

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        flat = flatten(tensor)
        if self.size == 1:
            return DONE
        near = _near(flat)
        return CopiedWork(self._inner.all_reduce(near, op), flat, near)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_parts(tensor, out, self.size)
        near = _room_for(out)
        return CopiedWork(self._inner.reduce_scatter(near, _near(tensor), op), flatten(out), near)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_parts(out, tensor, self.size)
        near = _room_for(out)
        return CopiedWork(self._inner.all_gather(near, _near(tensor)), flatten(out), near)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        near = _near(tensor) if self.rank == root else _room_for(tensor)
        return CopiedWork(self._inner.broadcast(near, root), flatten(tensor), near)

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        return self._inner.send(_near(tensor), to)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        near = _room_for(tensor)
        return CopiedWork(self._inner.recv(near, source), flatten(tensor), near)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


def _near(tensor: torch.Tensor) -> torch.Tensor:
    flat = flatten(tensor)
    return flat if flat.is_meta else _room_for(flat).copy_(flat)  # one without values is for the group to refuse


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(flatten(tensor).numel(), dtype=tensor.dtype)


def choose_transport(asked: str, devices: Sequence[str]) -> str:
    """A GPU has no memory that others could share: where there is one it is sockets, or NCCL. Else as asked for."""
    return "tcp" if "cuda" in devices else asked


def must_stage(device: str, devices: Sequence[str], *, has_nccl: bool) -> bool:
    """Whether tensors of a rank on this device go through main memory, among ranks on those devices."""
    return device != "cpu" and (set(devices) != {device} or not has_nccl)
