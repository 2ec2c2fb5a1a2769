"""The benchmark harness: what a reported number means."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import harness


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def turn(name: str, value: float) -> float:
        order.append(name)
        return value

    samples = harness.interleave({"a": lambda: turn("a", 2.0), "b": lambda: turn("b", 1.0)}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": [2.0] * 3, "b": [1.0] * 3}


def test_a_ratio_is_taken_inside_each_round() -> None:
    # The second round was ten times slower for both: the ratio does not notice.
    assert harness.ratio([4.0, 40.0, 4.0], [2.0, 20.0, 1.0])["median"] == 2.0


def test_a_summary_has_median_and_spread() -> None:
    summary = harness.summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary["median"], summary["low"], summary["high"]) == (3.0, 2.0, 4.0)
    assert harness.summarize([5.0])["median"] == 5.0


def test_a_result_can_be_read_saved_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    result = harness.record(
        "thing", {"rows": [{"size": "1 KB", "ms": harness.summarize([1.0, 2.0])}], "notes": ["so"]}
    )
    read: dict[str, Any] = json.loads(harness.save(result).read_text())
    assert read["command"].startswith("python -m benchmarks")
    assert read["machine"]["cores"] >= 1
    assert "1 KB" in harness.render(read)
    assert "so" in harness.render(read)


def test_every_module_with_a_main_is_a_benchmark() -> None:
    assert "allreduce" in command.names()
    assert not {"harness", "allreduce_mpi"} & set(command.names())


@pytest.mark.parametrize("arguments", [["nothing"], ["allreduce", "--rounds", "2"]])
def test_wrong_arguments_are_explained(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    assert "NAME" in capsys.readouterr().err
