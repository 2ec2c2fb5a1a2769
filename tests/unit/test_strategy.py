"""Strategies: what people write, in a script or on the command line, and what it means."""

import pytest

import shoal
from shoal.spec.errors import UserError
from shoal.spec.strategy import Split, combine, parse_split, parse_sync
from shoal.train.mesh import Mesh, make_mesh

SYNCS = {
    "all_reduce": shoal.all_reduce(),
    "sharded:optimizer": shoal.sharded("optimizer"),
    "sharded:parameters": shoal.sharded(),
    "local:32": shoal.local(32),
    "local:2.5s": shoal.local(seconds=2.5),
    "local:8,outer=nesterov,lr=0.5,codec=int8,fragments=4": shoal.local(
        8, outer="nesterov", lr=0.5, codec="int8", fragments=4
    ),
}

SPLITS = {
    "none": None,
    "tensor:2": shoal.tensor(2),
    "pipeline:3": shoal.pipeline(3),
    "pipeline:2,microbatches=8,schedule=gpipe": shoal.pipeline(2, microbatches=8, schedule="gpipe"),
    "pipeline:2,cuts=4": shoal.pipeline(2, cuts=("4",)),
    "pipeline:3,schedule=gpipe,cuts=blocks.2+head": shoal.pipeline(3, schedule="gpipe", cuts=("blocks.2", "head")),
    "tensor:2+pipeline:2": combine((shoal.tensor(2), shoal.pipeline(2))),
    "tensor:2+pipeline:3,cuts=a.1+b": combine((shoal.tensor(2), shoal.pipeline(3, cuts=("a.1", "b")))),
}


@pytest.mark.parametrize(("text", "sync"), SYNCS.items())
def test_a_sync_is_its_text(text, sync):
    assert parse_sync(text) == sync
    assert str(sync) == text


@pytest.mark.parametrize(("text", "split"), SPLITS.items())
def test_a_split_is_its_text(text, split):
    assert parse_split(text) == split
    assert str(split or "none") == text


def test_diloco_is_local_with_momentum_and_small_messages():
    assert parse_sync("diloco:16,fragments=2") == shoal.diloco(16, fragments=2)
    assert str(shoal.diloco(16)) == "local:16,outer=nesterov,codec=int8"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "There is no sync ''"),
        ("ring", "There is no sync 'ring'"),
        ("local", "lacks a value"),
        ("local:0", "every=0"),
        ("local:-3", "every=-3"),
        ("local:often", "every='often'"),
        ("local:8,speed=3", "speed"),
        ("local:8,codec=zip", "codec='zip'"),
        ("local:2,fragments=3", "3 fragments"),
        ("local:0s", "seconds=0"),
        ("sharded:everything", "level='everything'"),
        ("all_reduce:2", "more than is understood"),
    ],
)
def test_a_sync_that_cannot_be(text, word):
    with pytest.raises(UserError) as caught:
        parse_sync(text)
    assert word in str(caught.value.render())
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("sharded:2", "There is no split 'sharded'"),
        ("tensor", "lacks a value"),
        ("tensor:0", "size=0"),
        ("tensor:two", "size='two'"),
        ("pipeline:2,schedule=random", "schedule='random'"),
        ("pipeline:2,microbatches=0", "microbatches=0"),
        ("tensor:2+tensor:2", "once in each way"),
        ("tensor:2+ring:2", "There is no split 'ring'"),
        ("tensor:2,cuts=4", "more than is understood: cuts"),
    ],
)
def test_a_split_that_cannot_be(text, word):
    with pytest.raises(UserError) as caught:
        parse_split(text)
    assert word in str(caught.value.render())


def test_one_name_of_a_layer_is_no_tuple_of_them():
    with pytest.raises(UserError, match="This pipeline does not work") as caught:
        shoal.pipeline(2, cuts="layers")
    assert caught.value.hint == 'for example: cuts=("layers.2",)'


def test_parts_of_a_copy_are_neighbours():
    mesh = make_mesh(6, shoal.pipeline(2))
    assert mesh == Mesh(num_copies=3, num_parts=2)
    assert [mesh.copy_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert mesh.with_part(1) == (1, 3, 5)
    assert mesh.with_copy(2) == (4, 5)


@pytest.mark.parametrize(
    ("num_workers", "fits"), [(1, "-n 4,"), (3, "-n 4,"), (5, "-n 4 or -n 8"), (7, "-n 4 or -n 8")]
)
def test_workers_that_do_not_make_whole_copies(num_workers, fits):
    split = combine((shoal.tensor(2), shoal.pipeline(2)))
    assert isinstance(split, Split)
    with pytest.raises(UserError, match=f"{num_workers} workers cannot hold copies of 4 parts each") as caught:
        make_mesh(num_workers, split)
    assert fits in str(caught.value.hint)
