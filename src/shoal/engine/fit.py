"""Whether workers fit into the memory there is."""

from collections.abc import Mapping

from shoal.engine.machine import available_memory_bytes
from shoal.spec.errors import UserError

# A worker that has imported torch and made a small model; more where the model is larger.
TORCH_WORKER_BYTES = 350 << 20
PLAIN_WORKER_BYTES = 20 << 20


def check_memory(
    num_workers: int, worker_bytes: int, options: Mapping[str, str], available: int | None = None
) -> None:
    """Raise UserError where the workers would not even get as far as importing torch.

    `available` is measured where it is not given. The option `engine.worker_memory` replaces `worker_bytes`, a guess.
    """
    if "engine.worker_memory" in options:
        worker_bytes = parse_bytes(options["engine.worker_memory"])
    available = available_memory_bytes() if available is None else available
    if available is None or num_workers * worker_bytes <= available:
        return
    fitting = available // worker_bytes
    raise UserError(
        f"{num_workers} workers do not fit into memory.",
        why=f"each takes about {worker_bytes >> 20} MB, together {num_workers * worker_bytes >> 20} MB, "
        f"and {available >> 20} MB are available",
        hint=(f"use `-n {fitting}` or fewer; " if fitting else "")
        + "if yours take less, say so: `-o engine.worker_memory=100MB`",
    )


def parse_bytes(text: str) -> int:
    """A size as people write it: `100MB`, `1.5GiB`, `4096`. Powers of two throughout."""
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    shift = units.get(number[-1:], 0)
    try:
        size = int(float(number[:-1] if shift else number) * (1 << shift))
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise UserError(f"{text!r} is not a size.", hint="write it like 100MB or 2GB")
    return size
