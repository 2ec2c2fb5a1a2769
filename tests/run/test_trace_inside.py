"""What a run that has ended tells of the inside of its steps, though nobody asked for it while it ran."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.observe.metrics import read
from shoal.observe.spans import read as read_spans
from shoal.observe.trace import Span
from shoal.observe.turns import step_seconds
from shoal.testing import Faults

SCRIPT = """
import json, sys, torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
data = torch.randn(2048, 64), torch.randn(2048, 64)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

optimizer = torch.optim.SGD(model.parameters(), 1e-3)
shoal.Trainer(model, loss, optimizer, data, batch_size=32, **json.loads(sys.argv[1])).fit(steps=16)
"""
FIRST, LAST = 10, 12
CLOCKS_APART = 0.1
"""Spans and metrics read two clocks, one after the other; a busy machine may do something else in between."""


def spans_of(tmp_path: Path, settings: dict[str, object], transport: str) -> dict[int, list[Span]]:
    """Of each rank, all of which lie inside of the step they name."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = Faults().run(str(tmp_path / "train.py"), json.dumps(settings), options={"transport": transport})
    assert run.exit_code == 0
    found, rows = read_spans(run.run_dir), read(run.run_dir)
    assert sorted(found) == [0, 1]
    for rank, spans in found.items():
        steps = {row.step: row for row in rows[rank]}
        assert {span.step for span in spans} <= set(range(FIRST, LAST + 1))
        for span in spans:
            row = steps[span.step]
            begin = row.time - step_seconds(row) + row.load
            assert begin - CLOCKS_APART <= span.start, (span, row)
            assert span.start + span.seconds <= row.time + CLOCKS_APART, (span, row)
    assert [event.kind for event in run.events if event.kind in ("recording", "recorded")] == []
    return found


def kinds_of(spans: Sequence[Span]) -> set[str]:
    return {span.kind for span in spans}


def test_shared_memory_has_buckets_with_a_length(tmp_path: Path) -> None:
    for spans in spans_of(tmp_path, {}, "shm").values():
        assert {"compute", "bucket", "wait", "sum", "optimizer"} <= kinds_of(spans)
        assert all(span.seconds > 0 for span in spans if span.kind == "bucket")


def test_sockets_have_collectives_and_waits(tmp_path: Path) -> None:
    for spans in spans_of(tmp_path, {}, "tcp").values():
        assert {"compute", "collective", "agree", "optimizer"} <= kinds_of(spans)
        assert {"all_reduce", "wait"} <= {span.name for span in spans}
        assert any(span.args.get("bytes", 0) > 100_000 for span in spans if span.name == "all_reduce")


@pytest.mark.slow
def test_a_pipeline_has_waits_for_its_stages(tmp_path: Path) -> None:
    found = spans_of(tmp_path, {"split": "pipeline:2,microbatches=2"}, "shm")
    assert "wait for rank 1" in {span.name for span in found[0]}
    assert "wait for rank 0" in {span.name for span in found[1]}


def test_copies_that_train_by_themselves_have_codecs_and_waits(tmp_path: Path) -> None:
    for spans in spans_of(tmp_path, {"sync": "local:2,codec=int8,overlap=0"}, "tcp").values():
        assert {"compute", "codec", "collective", "wait"} <= kinds_of(spans)
        (beside,) = {span.args["thread"] for span in spans if span.kind == "codec"}
        assert beside == "shoal-agree"
