"""What the service learns from run folders: whatever is in them, and whenever it is killed."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event as Flag

import pytest

from shoal.learning import MAX_OBSERVATIONS, is_sound, pause_of, recall, remember, resize_of, study
from shoal.observe.journal import Journal
from shoal.observe.metrics import MetricsWriter
from shoal.observe.predictions import read_predictions
from shoal.observe.turns import merge_turns
from shoal.place.cluster import Node
from shoal.place.prior import PastJob, Traits
from shoal.place.throughput import Observation
from shoal.service import attempts
from shoal.service.asking import read_submission
from shoal.service.dispatch import Dispatcher
from shoal.service.job import Job
from shoal.service.learned import OWN_STEPS, Learned, Usual
from shoal.service.learner import HISTORY, Learner
from shoal.service.orders import Seen
from shoal.service.settings import Settings
from shoal.service.state import Shared
from shoal.service.store import Store
from shoal.service.transitions import release, see, start, submit
from shoal.service.writer import Writer
from shoal.spec.event import Event, StepMetrics

NODE = Node(name="a", cores=8.0, memory_bytes=1 << 34)


def write_run(
    folder: Path, steps: int = 20, *, workers: int = 1, seconds: float = 0.1, goal: int | None = 200
) -> str:
    """A run folder as a trainer leaves it: `steps` steps on each of 1 to `workers` workers, 50 s after its start."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"name": "r", "created": 0.0}')
    journal = Journal(str(folder / "journal.jsonl"))
    journal.write(Event(kind="run_started", time=1000.0))
    values = {"batch_size": {"value": 64, "source": "script"}, "parameters": {"value": 9, "source": "found"}}
    journal.write(Event(kind="settings", time=1001.0, rank=0, data=values))
    journal.write(Event(kind="goal", time=1002.0, rank=0, step=0, data={"num_steps": goal}))
    now, step, rows = 1050.0, 0, {rank: MetricsWriter(str(folder), rank) for rank in range(workers)}
    for size in range(1, workers + 1):
        members = {"generation": size - 1, "members": [f"{rank}.0" for rank in range(size)], "joined": []}
        journal.write(Event(kind="world", time=now + 1.0 * (size > 1), data=members))
        now += 3.0 * (size > 1)
        for _ in range(steps):
            now, step = now + seconds / size, step + 1
            for rank in range(size):
                rows[rank].write(metrics(step - 1, now, size, seconds / size))
    for writer in rows.values():
        writer.close()
    journal.write(Event(kind="run_ended", time=now + 4.0))
    journal.close()
    return str(folder)


def metrics(step: int, time: float, workers: int, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=time,
        epoch=0,
        loss=1.0,
        num_samples=64 // workers,
        global_samples=64,
        lr=0.1,
        compute=seconds,
        communicate=0.0,
        wait=0.0,
        load=0.0,
        other=0.0,
    )


class Service:
    """The parts of a service that learning touches, on disk."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = Store(str(home))
        self.writer = Writer(self.store)
        self.shared = Shared(
            home=str(home),
            folder=str(home),
            store=self.store,
            settings=Settings(),
            writer=self.writer,
            woken=Flag(),
            machines=(NODE,),
        )
        self.run_dirs: dict[int, str] = {}
        self.learner = Learner(self.shared, lambda job: Seen(run_dir=self.run_dirs.get(job.number, "")), dict)
        self.learner._begin()

    def add(self, script: str, run_dir: str = "", *, workers: int = 1, step: int = 20) -> Job:
        """A job that runs, seen at that step."""
        fields = {"args": [script], "dir": "/", "workers": f"1:{workers}" if workers > 1 else 1}
        (asked,) = read_submission({"jobs": [fields]}).jobs

        def act(change):
            made = change.add(lambda number: submit(number, "ann", asked, change.now, change.wall))
            begun = start(made, {"a": workers}, {}, change.now, kinds=("cpu",))
            change.put(replace(begun, state="running", has_run=True))
            return made.number

        number = self.writer.do(act).result()
        self.run_dirs[number] = run_dir
        self.look(number, step, workers)
        return self.store.known.jobs[number]

    def look(self, number: int, step: int, workers: int) -> None:
        seen = Seen(state="running", run_dir=self.run_dirs[number], step=step, num_workers=workers)
        self.shared.seen = {**self.shared.seen, number: seen}

    def end(self, number: int, seconds: float) -> Job:
        def act(change):
            job = replace(
                change.job(number), run_seconds=seconds, service_seconds=seconds, accrued_at=change.now + 1e9
            )
            after = see(job, Seen(state="ended", cause="finished", exit_code=0), change.now, change.wall)
            change.put(after)
            return after

        return self.writer.do(act).result()

    def know(self, job: Job, step: int | None = None):
        return self.shared.learned.know(job, job.max_workers, Usual((NODE,)), self.store.clock.now(), step)

    def close(self) -> None:
        self.writer.close()
        self.store.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.close()


def test_a_running_job_is_measured_and_its_predictions_are_kept(service: Service, tmp_path: Path):
    job = service.add("t.py", write_run(tmp_path / "runs" / "r", workers=2), workers=2, step=40)
    service.learner.turn()
    prospect = service.know(job, step=40)
    assert prospect.told_by == OWN_STEPS
    assert prospect.left_seconds == pytest.approx(160 * 0.05, rel=0.05)
    assert prospect.rate("cpu", 2, 1) > 1.8 * prospect.rate("cpu", 1, 1)
    assert prospect.stop_seconds == pytest.approx(54.0, abs=0.5), "50 s to its first step, 4 s to its end"
    assert prospect.resize_seconds == pytest.approx(3.0, abs=0.2)
    made = service.shared.learned.insights[job.number].predictions
    assert [each.workers for each in made] == [1, 2]
    assert read_predictions(service.run_dirs[job.number]) == list(made)
    assert abs(made[1].error) < abs(made[0].error)


def test_a_run_is_not_read_again_before_it_has_gone_on(service: Service, tmp_path: Path):
    job = service.add("t.py", write_run(tmp_path / "runs" / "r"))
    service.learner.turn()
    first = service.shared.learned.insights[job.number].rate
    service.look(job.number, 24, 1)
    service.learner.turn()
    assert service.shared.learned.insights[job.number].rate is first
    service.look(job.number, 40, 1)
    service.learner.turn()
    assert service.shared.learned.insights[job.number].rate is not first


def test_a_script_that_names_several_ends_has_named_none(service: Service, tmp_path: Path):
    folder = write_run(tmp_path / "runs" / "r")
    journal = Journal(os.path.join(folder, "journal.jsonl"))
    journal.write(Event(kind="goal", time=1060.0, rank=0, data={"num_steps": 400}))
    journal.close()
    job = service.add("t.py", folder)
    service.learner.turn()
    assert service.know(job).remaining_seconds is None
    assert service.know(job).rate is not None


def test_jobs_that_end_tell_of_the_next_and_a_service_that_was_killed_knows_them(service: Service, tmp_path: Path):
    job = service.add("t.py", write_run(tmp_path / "runs" / "r", workers=2), workers=2, step=40)
    plain = service.add("plain.py")
    service.learner.turn()
    for number, seconds in ((job.number, 300.0), (plain.number, 70.0)):
        service.learner.ended(service.end(number, seconds))
    service.learner._take_ended()
    service.learner._relearn()
    like = service.add("t.py", workers=2)
    assert service.know(service.add("plain.py")).left_seconds == pytest.approx(70.0, abs=1.0)
    work = 40 * 0.1 + (300.0 - 3.0)  # forty steps on one worker, and all that was no step
    told = service.know(like)
    assert told.told_by == "1 job like it"
    assert told.remaining_seconds == pytest.approx(work / 2, rel=0.1)
    assert told.rate is not None
    assert told.stop_seconds == pytest.approx(54.0, abs=0.5)
    (past,) = recall(str(tmp_path / HISTORY))
    assert (past.name, past.like[0], past.batches) == ("job-1", "t", (64.0, 64.0))
    # A new process knows the same, and does not write down again what is there.
    again = Learner(service.shared, lambda job: Seen(run_dir=service.run_dirs.get(job.number, "")), dict)
    service.shared.learned = replace(service.shared.learned, lengths=type(service.shared.learned.lengths)(), rates={})
    again._begin()
    assert service.know(like).remaining_seconds == pytest.approx(told.remaining_seconds, abs=1.0)
    assert service.know(like).rate is not None
    assert len(recall(str(tmp_path / HISTORY))) == 1
    # Killed before it had written: the run is read after the next start.
    os.unlink(tmp_path / HISTORY)
    Learner(service.shared, lambda job: Seen(run_dir=service.run_dirs.get(job.number, "")), dict)._begin()
    assert [past.name for past in recall(str(tmp_path / HISTORY))] == ["job-1"]


def _no_file(folder: Path) -> None:
    for name in ("journal.jsonl", "metrics-0.jsonl"):
        (folder / name).unlink()
        (folder / name).mkdir()


def _pipes(folder: Path) -> None:
    os.mkfifo(folder / "predictions.jsonl")
    (folder / "metrics-0.jsonl").unlink()
    os.mkfifo(folder / "metrics-0.jsonl")


def _garbage(folder: Path) -> None:
    for name in ("journal.jsonl", "metrics-0.jsonl", "predictions.jsonl"):
        (folder / name).write_bytes(os.urandom(5000) + b"\n[[[[\n{}\nnull\n")


def _odd_numbers(folder: Path) -> None:
    lines = (folder / "metrics-0.jsonl").read_text().replace('"compute":0.1', '"compute":-5.0')
    (folder / "metrics-0.jsonl").write_text(lines.replace('"global_samples":64', '"global_samples":0'))


def _odd_settings(folder: Path) -> None:
    lines = (folder / "journal.jsonl").read_text().replace('"value":64', '"value":"many"').replace("200", '{"a":1}')
    (folder / "journal.jsonl").write_text(lines)


@pytest.mark.parametrize("damage", [_no_file, _pipes, _garbage, _odd_numbers, _odd_settings])
def test_broken_run_folders_stop_nothing_and_are_told_once(
    service: Service, tmp_path: Path, damage, capfd: pytest.CaptureFixture[str]
):
    bad = service.add("bad.py", write_run(tmp_path / "runs" / "bad"))
    damage(tmp_path / "runs" / "bad")
    good = service.add("good.py", write_run(tmp_path / "runs" / "good"))
    for step in (20, 40, 80):
        service.look(bad.number, step, 1)
        service.learner.turn()
    assert service.know(good, step=20).told_by == OWN_STEPS
    service.know(bad, step=20)
    service.learner.ended(service.end(bad.number, 10.0))
    service.learner._take_ended()
    told = capfd.readouterr().err
    assert told.count("shoal: nothing is learned of job 1") <= 2


def test_a_broken_history_stops_nothing(tmp_path: Path):
    (tmp_path / HISTORY).write_bytes(
        b'{"traits":{"micro_batch":-1,"sizes":{}},"observations":[]}\n'
        b'{"traits":{"micro_batch":1,"sizes":{}},"observations":[{"nodes":0,"workers":1,"micro_batch":1,"step_seconds":0}]}\n'
        b"\xff\xfe\n" + b"[" * 100_000
    )
    service = Service(tmp_path)
    try:
        assert service.shared.learned.rates == {}
    finally:
        service.close()


def test_a_history_stays_small(tmp_path: Path):
    path = str(tmp_path / HISTORY)
    seen = tuple(Observation(nodes=1, workers=n, micro_batch=1.0, step_seconds=1.0) for n in range(1, 200))
    for number in range(40):
        past = PastJob(traits=Traits(micro_batch=1, sizes={}), observations=seen, name=f"job-{number}")
        remember(path, past, max_bytes=100_000)
    kept = recall(path)
    assert os.stat(path).st_size <= 120_000
    assert [past.name for past in kept] == [f"job-{number}" for number in range(40 - len(kept), 40)]
    assert len(kept[-1].observations) == MAX_OBSERVATIONS
    assert not is_sound(replace(kept[0], batches=(0.0, 1.0)))


def test_what_stopping_starting_and_resizing_take(tmp_path: Path):
    found = study(write_run(tmp_path / "r", workers=3))
    assert found.pause_seconds == pytest.approx(54.0, abs=0.5)
    assert found.resize_seconds == pytest.approx(3.0, abs=0.2)
    assert found.num_samples == 60 * 64
    assert found.traits == Traits(micro_batch=64.0, sizes={"batch_size": 64.0, "parameters": 9.0})
    rows = {0: [metrics(step, 10.0 + step, 1, 1.0) for step in range(3)]}
    assert pause_of(merge_turns(rows), []) is None
    assert resize_of(merge_turns(rows), []) is None


def test_a_model_that_is_no_good_stops_nobody(service: Service, capfd: pytest.CaptureFixture[str]):
    """Deciding goes on without it, and says so in the log once."""

    class Bad(Learned):
        def know(self, *_: object, **__: object):
            raise FloatingPointError("no number")

    asked = read_submission({"jobs": [{"args": ["t.py"], "dir": "/"}]}).jobs[0]
    for each in (asked, replace(asked, after=(1,))):
        service.writer.do(
            lambda change, each=each: change.add(lambda number: submit(number, "ann", each, 0.0, 0.0, is_held=True))
        ).result()
    service.writer.do(lambda change: change.put(release(change.job(2)))).result()
    dispatcher = Dispatcher(service.shared, attempts)
    service.shared.learned = Bad()
    dispatcher._decide_anyhow()
    dispatcher._decide_anyhow()
    assert service.shared.waits[2].why == "after job 1"
    assert "no number" in service.shared.problems["learning"]
    assert capfd.readouterr().err.count("Traceback") == 1
    service.shared.learned = Learned()
    dispatcher._decide_anyhow()
    assert "learning" not in service.shared.problems
