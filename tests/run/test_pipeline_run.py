"""Pipelines in real processes: what is refused before training, by all workers alike, and what goes on as ever."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pipelined
import pytest
import torch

import shoal
from shoal.spec.errors import ShoalError
from shoal.spec.strategy import pipeline
from shoal.testing.ranks import Member, ranks_of
from shoal.train.agree import check_copies
from shoal.train.mesh import make_mesh
from shoal.train.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, str]]:
    return shoal.launch(pipelined.collect, 2, run_dir=str(folder), is_quiet=True)


@pytest.fixture(scope="module")
def whole() -> Iterator[dict[str, str]]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, which recomputes nothing where a loss is only tried
        digests = pipelined.train_whole()
    yield digests
    torch.set_num_threads(threads)


SAID = {
    "twice": ("The loss called the model 2 times.", "call the model exactly once"),
    "never": ("The loss did not call the model.", "call the model exactly once"),
    "parameters": ("`parameters` of the model was used in a pipeline.", "move what needs `parameters` into"),
    "compile": ("compile=True does not work with a pipeline.", "leave compile= out"),
    "clipped": ("exact=True does not work with max_norm= in a pipeline.", "leave max_norm= out"),
    "turns": ("exact=True does not work with the interleaved schedule.", 'use schedule="1f1b"'),
    "hooks": ("The model (Sequential) has hooks on itself.", "put hooks on its layers"),
    "tied": ("the parameter first.weight is used on both sides, by first and last.", "untie it"),
    "decides": ("it decides by the values of a tensor", "move that code into a layer of its own"),
    "stages": ("2 stages are more than the model's 1 layer(s): 0.", "use shoal.pipeline(1) or fewer"),
    "samples": ("16 samples of each copy are too few for 17 micro-batches.", "use microbatches=16"),
    "shards": ("8 shards of each copy are too few for 9 micro-batches.", "use shards=9"),
    "cuts": ("There is no layer '7' to cut before.", "there are: 0, 1, 2, 3"),
    "pieces": ("microbatch_size is 4 on rank 0 and 5 on rank 1.", "give every worker the same"),
    "precision": ("precision is float32 on rank 0 and bf16 on rank 1.", "they hold one copy of the model together"),
    "unused": ("2 parameter(s) got no gradient: spare.bias, spare.weight.", "unused='zero'"),
    "nan": ("The loss is nan for samples", "look at `dataset[17]`"),
}


@pytest.mark.parametrize("case", SAID)
def test_it_is_refused_by_all_workers_alike(case: str, told: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(told):
        for part in SAID[case]:
            assert part in of_rank[case].replace(f"at: rank {rank}", "at: rank"), of_rank[case]


@pytest.mark.parametrize("case", list(pipelined.DONE))
def test_it_trains_to_the_same_bits_as_in_one_process(
    case: str, told: list[dict[str, str]], whole: dict[str, str]
) -> None:
    assert told[0][case] == told[1][case] == whole[case]


def test_where_the_model_was_cut_is_shown_and_written_down(told: list[dict[str, str]], folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    *chosen, by_hand, by_text = [event["data"] for event in events if event["kind"] == "pipeline"]
    assert chosen
    for cut in chosen:
        assert len(cut["cuts"]) == 1
        assert len(cut["ms"]) == len(cut["mib"]) == cut["chunks"] == 2
        assert all(value > 0 for value in cut["ms"])
    assert (by_hand["cuts"], by_text["cuts"]) == (["1"], ["2"])
    shown = [line for line in (folder / "logs" / "0.log").read_text().splitlines() if "pipeline of 2 stages" in line]
    assert len(shown) == len(chosen) + 2, "once for each"
    assert f"beginning with the first layer ({chosen[0]['ms'][0]:.3g} ms, " in shown[0]
    assert shown[-2].endswith("beginning with the first layer, 1")
    assert "pipeline of 2 stages" not in (folder / "logs" / "1.log").read_text()


def compare_in_copies(member: Member) -> list[str]:
    """Four workers in two copies: what is compared, and what is said of it."""
    told = []
    for values in ([4, 4, 5, 5], [4, 4, 5, 6]):
        try:
            settings = Settings(batch_size=8, microbatch_size=values[member.rank])
            check_copies(member.group, settings, 2)
        except ShoalError as error:
            told.append(error.message)
    return told


@pytest.mark.slow
def test_copies_may_differ_and_the_workers_of_one_may_not() -> None:
    with ranks_of(4, "shm") as ranks:
        message = "The workers do not agree: microbatch_size is 5 on rank 2 and 6 on rank 3."
        assert ranks.run(compare_in_copies) == [[message]] * 4


def test_workers_that_make_no_whole_copies_are_refused() -> None:
    with pytest.raises(ShoalError, match="3 workers cannot hold copies of 2 parts"):
        make_mesh(3, pipeline(2))
