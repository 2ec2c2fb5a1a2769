"""What the machines of a run were doing: one line a second and node, in a file for each node."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shoal.observe.decoding import decode_lines
from shoal.observe.lines import Report, say_nothing
from shoal.observe.merged import coarsen
from shoal.observe.segments import Bound, BoundedAppender, SegmentReader, list_names
from shoal.spec.system import SystemSample, WorkerSample


class SystemWriter:
    """Appends samples of any node. Nothing raises into the run: a failing disk is reported once."""

    def __init__(self, run_dir: str, report: Report = say_nothing) -> None:
        self._run_dir, self._report = run_dir, report
        self._files: dict[str, BoundedAppender] = {}

    def write(self, sample: SystemSample) -> None:
        """Append one sample."""
        path = system_path(self._run_dir, sample.node)
        if path not in self._files:
            self._files[path] = BoundedAppender(path, BOUND, self._report)
        self._files[path].append(_encoder.encode(sample) + b"\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def system_path(run_dir: str, node: str) -> str:
    """The file of a node; what could not be in a file name becomes a dash."""
    return os.path.join(run_dir, f"system-{re.sub(r'[^A-Za-z0-9_.-]', '-', node)[:100] or '-'}.jsonl")


class SystemReader:
    """Reads the samples of all nodes while they are being written. Lines that cannot be read are counted."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._files: dict[str, SegmentReader] = {}
        self._newest: dict[str, float] = {}
        self.num_damaged = 0

    def read_new(self) -> dict[str, list[SystemSample]]:
        """What was added since the last call, by node; nodes without news are absent."""
        news: dict[str, list[SystemSample]] = {}
        for name in sorted(list_names(self._run_dir, r"(system-.+\.jsonl)")):
            path = os.path.join(self._run_dir, name)
            found: list[SystemSample] = []
            for block in self._files.setdefault(path, SegmentReader(path)).read_new():
                good, num_damaged = decode(block.lines)
                # Who was away for long gets all of the past, and knows some of it already.
                newest = self._newest.get(path, 0.0)
                found = [one for one in good if one.time > newest] if block.is_past else found + good
                self.num_damaged += num_damaged
            if found:
                self._newest[path] = found[-1].time
            for sample in found:
                news.setdefault(sample.node, []).append(sample)
        return news


def decode(lines: bytes) -> tuple[list[SystemSample], int]:
    """The samples of a block of lines, and how many lines could not be read."""
    return decode_lines(lines, _decoder)


def fold(past: bytes, segment: bytes) -> bytes:
    """The past with one more part of the file in it, neighbours merged as far as they must be. Pure."""
    samples = [*decode(past)[0], *decode(segment)[0]]
    line_bytes = max(1, (len(past) + len(segment)) // max(1, len(samples)))
    kept = coarsen(samples, max(16, PAST_BYTES // line_bytes), lambda one: one.num_samples, merge)
    return b"".join(_encoder.encode(one) + b"\n" for one in kept)


def merge(samples: Sequence[SystemSample]) -> SystemSample:
    """One sample for several: rates are means, memory in use the most, room on the disk the least there was."""
    last, count = samples[-1], sum(one.num_samples for one in samples)

    def mean(values: Iterable[tuple[float, int]]) -> Any:
        pairs = list(values)
        return round(sum(value * weight for value, weight in pairs) / max(1, sum(weight for _, weight in pairs)), 4)

    def merge_worker(rank: int) -> WorkerSample:
        known = [(one.workers[rank], one.num_samples) for one in samples if rank in one.workers]
        rates: dict[str, Any] = {
            name: mean((getattr(worker, name), num) for worker, num in known) for name in _WORKER_RATES
        }
        return replace(
            known[-1][0],
            rss=max(worker.rss for worker, _ in known),
            **rates,
        )

    return replace(
        last,
        num_samples=count,
        memory_used=max(one.memory_used for one in samples),
        disk_free=min(one.disk_free for one in samples),
        **{name: mean((getattr(one, name), one.num_samples) for one in samples) for name in _RATES},
        workers={rank: merge_worker(rank) for rank in sorted({rank for one in samples for rank in one.workers})},
    )


_RATES = ("cpu", "swap_in", "swap_out", "disk_read", "disk_write", "net_in", "net_out")
_WORKER_RATES = ("cpu", "major_faults", "throttled", "run_delay")
PAST_BYTES = 4 << 20
BOUND = Bound(segment_bytes=2 << 20, num_sealed=2, fold=fold)
"""The newest hour or more of a node as it was, 6 MB; all before in about 4 MB."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SystemSample)
