"""`shoal.group()`: workers of a run that talk to each other, without a trainer."""

import pytest
from launching import Box, box

import shoal

__all__ = ["box"]


def talk() -> tuple[int, int, list[float], list[float]]:
    import torch

    world = shoal.group()
    everyone = torch.full((2,), world.rank + 1.0)
    world.all_reduce(everyone).wait()
    pair = [0, 1] if world.rank < 2 else [2]
    mine = shoal.group(pair)
    again = shoal.group(pair)
    some = torch.full((1,), float(world.rank))
    mine.all_reduce(some).wait()
    again.all_reduce(some).wait()
    facts = mine.rank, mine.size, everyone.tolist(), some.tolist()
    for group in (again, mine, world):
        group.close()
    return facts


def test_all_workers_and_some_of_them() -> None:
    assert shoal.launch(talk, 3, is_quiet=True) == [
        (0, 2, [6.0, 6.0], [2.0]),
        (1, 2, [6.0, 6.0], [2.0]),
        (0, 1, [6.0, 6.0], [2.0]),
    ]


def test_a_lone_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = shoal.group()
    assert (group.rank, group.size) == (0, 1)
    group.close()
    with pytest.raises(shoal.UserError, match=r"ranks \[0, 1\] cannot be formed"):
        shoal.group([0, 1])


def test_an_elastic_run_has_no_group(box: Box) -> None:
    script = box.write("script.py", "import shoal\nshoal.group()\n")
    done = box.run("run", "-n", "1:2", str(script))
    assert done.returncode == 2
    assert "needs a run of fixed size" in done.stderr
