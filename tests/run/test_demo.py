"""The parts of the demo: its models train, and what it says follows from what it saw."""

from dataclasses import replace

import pytest

from shoal import demo
from shoal.run import Keep, run_job
from shoal.spec.job import Job


@pytest.mark.parametrize(
    ("module", "args"), [("shoal.demo.text", ("--steps", "3")), ("shoal.demo.digits", ("--epochs", "1"))]
)
def test_a_model_of_the_demo_trains(module, args, tmp_path):
    job = Job(module=module, args=args, num_workers=2, threads_per_worker=1)
    outcome = run_job(job, keep=Keep(dir=str(tmp_path / "run")), is_quiet=True)
    assert outcome.exit_code == 0
    assert "digest of the parameters: " in (tmp_path / "run" / "logs" / "0.log").read_text()


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
    assert "1.90 times as fast as 1, and give the same parameters" in demo.sum_up(seen, 50.0)


def test_different_digests_are_not_passed_over():
    seen = [SEEN, replace(SEEN, num_workers=2, digest="abd"), replace(SEEN, module="shoal.demo.race", digest="")]
    assert demo.compare(seen) == [("shoal.demo.text", False)]
    assert "DIFFERENT" in demo.sum_up(seen, 50.0)
