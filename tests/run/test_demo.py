"""The parts of the demo: its models train, and what it says follows from what it saw."""

import io
from dataclasses import replace

from shoal import demo
from shoal.run import Keep, run_job
from shoal.spec.job import Job


def test_the_cnn_of_the_demo_trains(tmp_path):
    job = Job(module="shoal.demo.digits", args=("--epochs", "1"), num_workers=2, threads_per_worker=1)
    outcome = run_job(job, keep=Keep(dir=str(tmp_path / "run")), is_quiet=True)
    assert outcome.exit_code == 0
    assert "digest of the parameters: " in (tmp_path / "run" / "logs" / "0.log").read_text()


def test_a_worker_is_killed_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    act = demo.Act(title="", module="shoal.demo.text", num_workers=1, args=("--steps", "8", "--batch-size", "16"))
    out = io.StringIO()
    played = [demo.play(each, out) for each in (act, replace(act, num_workers=2, kill_step=3))]
    seen = [each for _, each in played]
    assert [code for code, _ in played] == [0, 0]
    assert demo.compare(seen) == [("shoal.demo.text", True)]
    assert [each.num_samples for each in seen] == [128, 128]
    assert seen[0].rescue is None
    assert seen[1].rescue.num_steps == 8
    assert 0 < seen[1].rescue.recovery_seconds < 20


SEEN = demo.Seen(
    module="shoal.demo.text",
    num_workers=1,
    run_dir="runs/a",
    digest="abc",
    samples_per_second=100.0,
    shares={"compute": 0.9, "communicate": 0.1, "wait": 0.0},
    words=("shoal is 1.40 times as fast",),
)


def test_equal_digests_are_told_as_equal():
    seen = [
        SEEN,
        replace(SEEN, num_workers=2, samples_per_second=190.0),
        replace(SEEN, module="shoal.demo.race", digest=""),
    ]
    assert demo.compare(seen) == [("shoal.demo.text", True)]
    told = " ".join(demo.sum_up(seen, 50.0).split())
    assert "1.90 times as fast as 1, and give the same parameters" in told


def test_a_rescue_is_told():
    rescue = demo.Rescue(num_steps=96, recovery_seconds=0.31, away_seconds=2.5, effective_ratio=0.97)
    first = replace(SEEN, num_samples=24_000)
    killed = replace(first, num_workers=2, rescue=rescue, run_dir="runs/killed")
    race = replace(SEEN, module="shoal.demo.race", digest="")
    text = demo.sum_up([first, killed, race], 50.0)
    words = " ".join(text.replace("\xa0", " ").split())
    assert "killed (kill -9). The next step was done 0.31 s later, and another worker was in after 2.5 s." in words
    assert "24,000 samples in 96 steps, each counted once, give the same parameters to the last bit" in words
    assert "shoal explain killed" in words
    assert "1:2" in words
    assert max(map(len, text.splitlines())) <= 80


def test_samples_that_are_missing_are_not_passed_over():
    rescue = demo.Rescue(num_steps=95, recovery_seconds=None, away_seconds=None, effective_ratio=None)
    seen = [replace(SEEN, num_samples=100), replace(SEEN, num_samples=99, rescue=rescue)]
    assert demo.compare(seen) == [("shoal.demo.text", False)]
    told = replace(seen[1], rescue=replace(rescue, recovery_seconds=0.3))
    assert "99 samples in 95 steps, instead of 100" in " ".join(demo.sum_up([seen[0], told], 1.0).split())


def test_different_digests_are_not_passed_over():
    seen = [SEEN, replace(SEEN, num_workers=2, digest="abd"), replace(SEEN, module="shoal.demo.race", digest="")]
    assert demo.compare(seen) == [("shoal.demo.text", False)]
    assert "DIFFERENT" in demo.sum_up(seen, 50.0)
