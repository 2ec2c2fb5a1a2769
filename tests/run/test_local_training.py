"""Local steps with real processes: everything around them works, and nobody waits for a slow worker."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

import shoal
from shoal.observe import metrics
from tests.run import local_jobs
from tests.run.launching import Box


def launch(function, num_workers, run_dir: Path, *args, **options):
    return shoal.launch(function, num_workers, args=args, run_dir=str(run_dir), is_quiet=True, **options)


def events(run_dir: Path, kind: str):
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_everything_else_works_with_local_steps(tmp_path):
    found = launch(local_jobs.everything, 2, tmp_path / "run")
    assert found[0]["same"] == found[1]["same"]
    assert found[0]["own"] != found[1]["own"]  # each says what it lost itself
    before, _, averaged, averaged_digest, after, lr = found[0]["same"]
    assert before == after
    assert averaged_digest != found[0]["same"][1]
    assert max(before, averaged) < 1.3  # four classes: 1.39 is guessing
    assert lr == pytest.approx(0.01 * 0.9**3)
    # Those of steps 10 and 20 fell into rounds of 8, and were made when these were over.
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint_saved")] == [16, 24, 30]


@pytest.mark.slow
def test_checkpoints_go_from_one_way_to_agree_to_another(tmp_path):
    box, story = Box(tmp_path), []
    ways = [("diloco:4", "2", "22"), ("all_reduce", "1", "26"), ("local:4", "3", "34"), ("diloco:4", "2", "42")]
    for sync, num_workers, steps in ways:
        which = "--resume" if story else "--name"
        done = box.run("run", "-n", num_workers, which, "kept", "-o", f"sync={sync}", local_jobs.__file__, steps)
        assert done.returncode == 0, done.stderr
        story.append(json.loads(re.search(r"\{.*\}", done.stdout)[0]))
    assert [each["began"] for each in story] == [0, 22, 26, 34]
    assert max(each["loss"] for each in story) < 1.3, "what was learned is kept on every way; untrained it is 2.3"


def test_a_slow_worker_takes_fewer_steps_and_nobody_waits(tmp_path):
    """Speeds 1:3. With equal shares the fast one would wait for two thirds of the time."""
    (fast, spent, _), (slow, _, _) = launch(local_jobs.uneven, 2, tmp_path / "run", "local:6", 48, (0.04, 0.12))
    assert sorted(fast + slow) == sorted(set(fast + slow))
    assert len(fast + slow) == 48 * 8
    assert len(fast) / len(slow) > 1.6
    for steps in metrics.read(str(tmp_path / "run")).values():
        assert sum(step.wait for step in steps) < 0.5 * spent
    shares = events(tmp_path / "run", "rebalanced")
    assert 0.6 < shares[-1]["data"]["shares"][0] < 0.85


def test_rounds_of_seconds_get_the_steps_that_take_so_long(tmp_path):
    (first, spent, _), (second, _, _) = launch(local_jobs.uneven, 2, tmp_path / "run", "local:0.2s", 60, (0.01, 0.01))
    assert len(set(first + second)) == 60 * 8
    assert spent < 15, "0.7 s where nothing else goes on"


@pytest.mark.slow
def test_rounds_of_seconds_are_as_long_for_unequal_workers(tmp_path):
    """Speeds 1:3. The first round has 8 steps, whatever they take; then length and shares follow from times."""
    (fast, spent, ends), (slow, _, others) = launch(
        local_jobs.uneven, 2, tmp_path / "run", "local:0.2s", 80, (0.02, 0.06)
    )
    assert len(fast + slow) == len(set(fast + slow)) == 80 * 8
    assert len(fast) / len(slow) > 1.6, "the slow one takes fewer inner steps"
    assert len(ends) == len(others), "all have the same rounds"
    lengths = [stop - start for start, stop in pairwise(ends[2:])]
    assert len(lengths) >= 3
    # A round is whole steps of 30 ms, measured in the round before; a busy machine adds to each.
    assert 0.1 < median(lengths) < 0.4
    for steps in metrics.read(str(tmp_path / "run")).values():
        assert sum(step.wait for step in steps) < 0.3 * spent, "nobody waits for long"


def test_a_batch_that_is_no_good_is_left_out_by_one_worker_alone(tmp_path):
    (digest, first), (other, second) = launch(local_jobs.with_bad_sample, 2, tmp_path / "run")
    assert digest == other
    assert sum(map(math.isnan, first)) + sum(map(math.isnan, second)) == 1
    (skipped,) = events(tmp_path / "run", "step_skipped")
    assert 5 in skipped["data"]["samples"]


def test_a_round_longer_than_the_run_is_refused(tmp_path):
    (told,) = launch(local_jobs.too_long, 1, tmp_path / "run")
    assert "every 20 steps" in told
    assert "every=19 or less" in told


def test_exact_and_local_exclude_each_other(tmp_path):
    with pytest.raises(shoal.UserError, match="exclude each other"):
        local_jobs.train(8, sync="local:4", exact=True, run_dir=str(tmp_path / "run"))
