"""Lists of faults: built, written down, read again, and wrong."""

import json

import pytest

from shoal.spec.errors import UserError
from shoal.spec.fault import KINDS, POINTS, Fault
from shoal.testing.faults import Faults
from shoal.testing.faulty_run import make_job, parse_workers, variables

ALL = (
    Faults()
    .kill(rank=1, step=3)
    .kill(rank=1, step=4, at="updating", incarnation=1)
    .kill_launcher(step=6)
    .freeze(rank=0, step=10, seconds=5)
    .hang(rank=1, step=7)
    .slow(rank=2, step=5, seconds=0.2, steps=20)
    .fail(rank=1, step=4, error="no", retryable=True)
    .nan(rank=0, step=2, steps=3)
    .corrupt(rank=1, step=9)
    .corrupt(rank=1, step=9, bit=30)
    .partition(rank=1, step=3, seconds=2)
    .disk_full(after_step=5, mebibytes=3, seconds=1)
    .kill(rank=0, after_seconds=2.5, incarnation=None)
)


def test_a_list_never_changes():
    one = Faults().kill(rank=1, step=3)
    two = one.freeze(rank=0, step=10, seconds=5)
    assert (len(Faults()), len(one), len(two)) == (0, 1, 2)
    assert next(iter(two)) == Fault(kind="kill", rank=1, step=3)


def test_there_is_a_call_for_every_kind():
    assert {fault.kind for fault in ALL} == set(KINDS)
    assert all(hasattr(Faults, kind) for kind in KINDS)


def test_json_and_back(tmp_path):
    assert Faults.parse(ALL.to_json()) == ALL
    ALL.write(tmp_path / "faults.json")
    assert Faults.read(tmp_path / "faults.json") == ALL
    assert json.loads(ALL.env()["SHOAL_FAULTS"])[0] == {"kind": "kill", "rank": 1, "step": 3}


def test_a_random_list_is_that_of_its_seed():
    make = lambda seed, **more: Faults.random(seed, num_workers=4, count=50, **more)  # noqa: E731
    assert make(1) == make(1) != make(2)
    steps = [fault.step for fault in make(1)]
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert min(gaps) == 2
    assert max(gaps) == 5
    assert {fault.rank for fault in make(1)} == {0, 1, 2, 3}
    assert {fault.at for fault in make(1)} == set(POINTS) - {"saving"}
    assert {fault.incarnation for fault in make(1)} == {None}
    timed = make(1, unit="seconds", kinds=("kill", "freeze", "nan"))
    assert {fault.kind for fault in timed} == {"kill", "freeze", "nan"}
    assert Faults.parse(timed.to_json()) == timed
    assert 100 < list(timed)[-1].after_seconds < 250


def test_a_thousand_kills_fit_where_they_must(tmp_path):
    kills = Faults.random(1, num_workers=4, count=1000, unit="seconds")
    assert Faults.parse(kills.env()["SHOAL_FAULTS"]) == kills
    more = Faults.random(1, num_workers=4, count=3000)
    with pytest.raises(UserError, match="too many for an environment variable"):
        more.env()
    path = variables(more, str(tmp_path))["SHOAL_FAULTS"]
    assert Faults.read(path.removeprefix("@")) == more


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("{}", "holds a dict instead of a list"),
        ("[3]", "fault 1 of f.json is '3' instead of an object"),
        (
            '[{"kind": "kill", "rank": 1, "step": 3}, {"rank": 1, "step": 3}]',
            "fault 2 of f.json is wrong: It has no kind",
        ),
        ('[{"kind": "kil", "rank": 1, "step": 3}]', "no fault 'kil'"),
        ('[{"kind": "kill", "rank": 1, "steppe": 3}]', "no field 'steppe'"),
        ('[{"kind": "kill", "rank": 1}]', "needs a step or after_seconds"),
        ('[{"kind": "kill", "rank": 1, "step": 1, "after_seconds": 1}]', "and not both"),
        ('[{"kind": "kill", "rank": -1, "step": 3}]', "rank of a kill is -1"),
        ('[{"kind": "kill", "rank": true, "step": 3}]', "rank of a kill is True"),
        ('[{"kind": "kill", "rank": 1, "step": 1.5}]', "step of a kill is 1.5"),
        ('[{"kind": "kill", "rank": 1, "step": 1, "at": "midnight"}]', "no point 'midnight'"),
        ('[{"kind": "kill", "rank": 1, "step": 1, "seconds": 2}]', "A kill has no seconds"),
        ('[{"kind": "corrupt", "rank": 1, "step": 1, "bit": -1}]', "bit of a corrupt is -1"),
        ('[{"kind": "slow", "rank": 1, "step": 1}]', "does not say how slow"),
        ('[{"kind": "freeze", "rank": 1, "step": 1, "seconds": NaN}]', "seconds of a freeze is nan"),
        ('[{"kind": "fail", "rank": 1, "step": 1, "error": 3}]', "error= of a fail is a text"),
        ('[{"kind": [], "rank": 1, "step": 1}]', "no fault"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, told):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Faults.read(path)
    assert told in caught.value.message.replace(f"{tmp_path}/", "")
    assert caught.value.hint or caught.value.why


def test_close_words_are_offered():
    with pytest.raises(UserError) as caught:
        Faults.parse('[{"kind": "kil", "rank": 1, "step": 3}]')
    assert caught.value.hint == "did you mean `kill`?"


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="Cannot read the faults in"):
        Faults.read(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read the faults in"):
        Faults.read(tmp_path / "binary")


def test_an_argument_that_no_fault_has():
    with pytest.raises(UserError, match=r"kill: .*unexpected keyword argument 'rnak'"):
        Faults().kill(1, 3, rnak=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"unit": "years"},
        {"num_workers": 0},
        {"every": (5, 2)},
        {"every": (-1, 2)},
        {"kinds": ("war",)},
        {"kinds": ()},
    ],
)
def test_a_random_list_that_makes_no_sense(wrong):
    with pytest.raises(UserError):
        Faults.random(1, **{"num_workers": 2, "count": 3, **wrong})


def test_how_many_workers():
    assert parse_workers(3) == (None, 3)
    assert parse_workers("3") == (None, 3)
    assert parse_workers("2:4") == (2, 4)
    for wrong in (0, -1, "x", "4:2", "0:2", ":", "2:", ":2", ""):
        with pytest.raises(UserError, match="num_workers is"):
            parse_workers(wrong)
    job = make_job(("train.py", "--lr", "1"), "2:4", {"A": "1"}, {})
    assert (job.script, job.args, job.num_workers, job.min_workers) == ("train.py", ("--lr", "1"), 4, 2)
