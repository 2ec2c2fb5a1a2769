"""Event files of TensorBoard, read for their numbers: large ones in little memory, damaged ones as far as they go."""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.errors import UserError

MAX_RECORD = 1 << 20
"""Larger records hold pictures, sounds or graphs, and are passed over unread."""
CHECKED_BYTES = 4096
"""The sums of larger records are not checked: pictures again, and this is Python."""
MAX_STEP = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number, as a file has it."""

    tag: str
    step: int
    time: float
    value: float


@dataclass(slots=True)
class Reading:
    """How it goes. `damage` says of each damaged file what was found, and how much of it could be read."""

    num_numbers: int = 0
    num_bytes: int = 0
    num_passed_over: int = 0
    damage: list[str] = field(default_factory=list)


def find_folders(root: str) -> dict[str, list[str]]:
    """Every folder under `root`, itself included, that holds event files: its files, in the order they were begun.

    TensorBoard takes each of them for a run. Links to folders are not followed: they may lead in circles.
    """
    found = {}
    for folder, folders, names in os.walk(root):
        folders.sort()
        files = sorted(name for name in names if "tfevents" in name and not name.endswith(".profile-empty"))
        if files:
            found[folder] = [os.path.join(folder, name) for name in files]
    return found


def read_numbers(path: str, reading: Reading) -> Iterator[Number]:
    """The numbers of one file, in the order they were written. What is no number is passed over."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        hint = "run `pip install 'shoal[tensorboard]'`"
        raise UserError("TensorBoard is not installed.", why=str(error), hint=hint) from error
    for data in _records(path, reading):
        event = Event()
        try:
            event.ParseFromString(data)
        except Exception:  # protobuf has its own, which is elsewhere in every version
            _note(reading, path, "a record is not an event")
            continue
        for value in event.summary.value:
            number = _number(value)
            if number is None or not 0 <= event.step < MAX_STEP:
                reading.num_passed_over += 1
            else:
                reading.num_numbers += 1
                yield Number(tag=value.tag, step=event.step, time=event.wall_time, value=number)


def _number(value: Any) -> float | None:
    """The number of a summary: PyTorch writes it plainly, TensorFlow 2 as a tensor with one element."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    tensor = value.tensor
    numbers = tensor.float_val or tensor.double_val or tensor.int_val or tensor.int64_val
    if len(numbers) == 1:
        return float(numbers[0])
    form = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}.get(tensor.dtype)
    if form is not None and len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    return None


def _records(path: str, reading: Reading) -> Iterator[bytes]:
    """The records of a file. Each is: length, sum of the length, data, sum of the data.

    Where a length is damaged nobody knows where the next record begins, and reading ends; data that is damaged
    costs one record. A file that is still being written ends in the middle of one: that is no damage.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(12)) == 12:
                length, check = struct.unpack("<QI", header)
                if masked_crc32c(header[:8]) != check:
                    _note(
                        reading, path, f"it is damaged at byte {file.tell() - 12} of {size}, and was read up to there"
                    )
                    return
                reading.num_bytes += 16 + length
                if length > MAX_RECORD:
                    reading.num_passed_over += 1
                    file.seek(length + 4, os.SEEK_CUR)
                    continue
                data = file.read(length + 4)
                if len(data) < length + 4:
                    return
                body, (check,) = data[:length], struct.unpack("<I", data[length:])
                if length <= CHECKED_BYTES and masked_crc32c(body) != check:
                    _note(reading, path, f"a record at byte {file.tell() - length - 16} is damaged, and left out")
                    continue
                yield body
    except OSError as error:
        _note(reading, path, f"it cannot be read: {error.strerror or error}")


def _note(reading: Reading, path: str, what: str) -> None:
    """One line a file."""
    if not any(line.startswith(f"{path}: ") for line in reading.damage):
        reading.damage.append(f"{path}: {what}")
