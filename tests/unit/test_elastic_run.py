"""What people are told about workers that come and go, and which of their ends explain a failure."""

import pytest

from shoal.elastic.decision import Note
from shoal.elastic_run import ElasticRun, Hooks, tell
from shoal.engine.cause import Evidence
from shoal.engine.local import LocalEngine
from shoal.spec.event import Event
from shoal.spec.job import WorkerExit, WorkerSpec


def no_spec(worker: int, incarnation: int) -> WorkerSpec:
    raise AssertionError("nobody is started here")


@pytest.fixture
def run() -> ElasticRun:
    hooks = Hooks(spec_of=no_spec, write=print, show=print, began=print, changed=print)
    return ElasticRun(LocalEngine(), 2, 4, hooks)


def failed(rank: int, kind: str, message: str, time: float, **data: object) -> Event:
    return Event(kind="error", time=time, rank=rank, data={"type": kind, "message": message, **data})


@pytest.mark.parametrize(
    ("note", "num_workers", "is_back", "text"),
    [
        (Note("worker_lost", 1), 3, 0, "lost rank 1 (killed by SIGKILL)"),
        (Note("worker_joined", 1), 4, 2, "rank 1 is back; 4 workers"),
        (Note("worker_joined", 5), 6, 0, "rank 5 has joined; 6 workers"),
        (Note("worker_frozen", 0, {"silent_seconds": 1.26}), 2, 0, "rank 0 is frozen: no sign of life for 1.3 s; "),
        (Note("worker_hung", 0, {"waited_seconds": 12}), 2, 0, "rank 0 hangs: others have waited 12.0 s for it; "),
        (Note("waiting_for_workers", None, {"present": 1, "min_workers": 2}), 1, 0, "1 left and 2 needed; waiting "),
    ],
)
def test_changes_are_told_in_a_line(note: Note, num_workers: int, is_back: bool, text: str) -> None:
    assert tell(note, num_workers, "(killed by SIGKILL)", is_back=is_back).startswith(text)


def test_most_is_only_for_the_journal() -> None:
    for note in (Note("world", None, {"members": []}), Note("resized")):
        assert tell(note, 3, "", is_back=False) == ""


def test_an_end_is_a_loss_or_a_failure(run: ElasticRun) -> None:
    assert run.exited(WorkerExit(rank=0, code=-9, time=1.0), is_failure=False)
    assert not run.exited(WorkerExit(rank=1, code=0, time=1.0), is_failure=False)
    assert not run.exited(WorkerExit(rank=2, code=1, time=1.0), is_failure=True)
    assert not run.exited(WorkerExit(rank=2, code=-11, time=1.0), is_failure=True), "it had reported an error"
    run.hear(failed(3, "Retryable", "gone", 1.0, is_retryable=True))
    assert run.exited(WorkerExit(rank=3, code=75, time=1.0), is_failure=True)
    assert run.lost_ranks == {0, 3}


def test_a_loss_does_not_hide_a_mistake(run: ElasticRun) -> None:
    run.exited(WorkerExit(rank=0, code=-9, time=99.0), is_failure=False)
    exits = [WorkerExit(rank=1, code=1, time=100.0)]
    (only,) = run.find_failures(Evidence(exits=exits, errors=[failed(1, "ValueError", "bad", 100.0)]))
    assert (only.rank, only.message) == (1, "ValueError: bad")


def test_a_loss_explains_a_lost_peer_unless_it_is_long_ago(run: ElasticRun) -> None:
    evidence = Evidence(
        exits=[WorkerExit(rank=1, code=1, time=100.0)],
        errors=[failed(1, "RuntimeError", "Connection closed by peer", 100.0)],
    )
    run.exited(WorkerExit(rank=2, code=-9, time=50.0), is_failure=False)
    assert [failure.rank for failure in run.find_failures(evidence)] == [1]
    run.exited(WorkerExit(rank=0, code=-9, time=99.0), is_failure=False)
    assert [failure.rank for failure in run.find_failures(evidence)] == [0, 1]


def test_who_ended_well_after_losses_has_succeeded(run: ElasticRun) -> None:
    run.exited(WorkerExit(rank=0, code=-9, time=99.0), is_failure=False)
    assert run.find_failures(Evidence(exits=[WorkerExit(rank=1, code=0, time=100.0)])) == []


def test_if_all_are_lost_that_is_the_failure(run: ElasticRun) -> None:
    for rank in range(2):
        run.exited(WorkerExit(rank=rank, code=-9, time=100.0 + rank), is_failure=False)
    first, second = run.find_failures(Evidence())
    assert (first.rank, first.message, second.rank) == (0, "The worker was killed by SIGKILL.", 1)


@pytest.mark.parametrize("data", [{}, {"generation": "x"}, {"generation": None, "members": 7}, {"process": [1]}])
def test_nonsense_from_a_worker_changes_nothing(run: ElasticRun, data: dict[str, object]) -> None:
    for kind in ("ready", "gather", "beat", "waiting", "called", "boundary", "nothing"):
        run.hear(Event(kind=kind, time=1.0, rank=0, data=data))
    run.look()
