"""Workers that are not alike, as `shoal explain` tells of them."""

from observing import event

from shoal.observe.equipment import find_equipment, write_equipment

MB = 1 << 20


def settings(rank: int, **changes: object):
    data = {"device": "cpu", "precision": "float32", "threads": 2, "piece": None}
    data |= {"memory_bytes": 900 * MB, "memory_from": "machine", **changes}
    return event("worker_settings", rank=rank, **data)


def test_workers_that_are_alike_need_no_words():
    assert find_equipment([settings(0), settings(1), event("settings", rank=0)]) == ()
    assert find_equipment([settings(0, device="cuda:0"), settings(1, device="cuda:1")]) == ()
    assert find_equipment([]) == ()


def test_what_is_different_is_told():
    found = find_equipment([settings(1, device="cuda:1", precision="bf16"), settings(0)])
    assert list(write_equipment(found)) == [
        "rank  device   precision  threads  memory     samples at a time",
        "0     cpu      float32    2        900 MB     all of its share",
        "1     cuda:1   bf16       2        900 MB     all of its share",
    ]


def test_the_newest_piece_counts_and_its_peak_where_it_is_known():
    little = settings(1, piece=3, memory_from="memory=900MB")
    grown = event("piece", rank=1, step=2, samples=12, before=3, peak_bytes=500 * MB)
    kept = event("piece", rank=1, step=4, samples=12, before=12, peak_bytes=850 * MB)
    assert list(write_equipment(find_equipment([settings(0), little])))[2].endswith("3 (memory=900MB)")
    for events, told in (([grown], "12 (memory=900MB)"), ([grown, kept], "12 (memory=900MB, 850 MB used)")):
        rows = list(write_equipment(find_equipment([settings(0), little, *events])))
        assert rows[2].endswith(told)


def test_a_damaged_event_harms_nobody():
    odd = event("worker_settings", rank=1, device=7, threads="many", piece="some")
    (_, row) = find_equipment([settings(0), odd])
    assert (row.device, row.threads, row.piece) == ("7", 0, None)
    assert find_equipment([event("piece", rank=3, samples=2)]) == ()
