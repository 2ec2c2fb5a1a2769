"""What happened inside of steps, where somebody asked for it: `spans-RANK.jsonl`, one span a line."""

import os
import re

import msgspec

from shoal.observe.lines import open_file
from shoal.observe.trace import Span

_NAME = re.compile(r"spans-(\d{1,9})\.jsonl")
_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = msgspec.json.Decoder(Span, strict=False)


def spans_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, f"spans-{rank}.jsonl")


def encode(span: Span) -> bytes:
    """One line of the file, with its newline."""
    return _encoder.encode(span) + b"\n"


def read(run_dir: str) -> dict[int, list[Span]]:
    """The spans of every rank that has some. Damaged lines are passed over."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return {}
    ranks = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    return {rank: _read(spans_path(run_dir, rank)) for rank in ranks}


def _read(path: str) -> list[Span]:
    found = []
    try:
        with open_file(path) as file:
            for line in file:
                try:
                    found.append(_decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue
    except OSError:
        return found
    return found
