"""Pipelines in real processes: what is refused before training, by all workers alike, and what goes on as ever."""

import warnings
from collections.abc import Iterator

import pipelined
import pytest
import torch

import shoal
from shoal.spec.errors import ShoalError
from shoal.spec.strategy import pipeline
from shoal.train.mesh import make_mesh


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("run")
    return shoal.launch(pipelined.collect, 2, run_dir=str(folder / "run"), is_quiet=True)


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
    "unused": ("2 parameter(s) got no gradient: spare.bias, spare.weight.", "unused='zero'"),
    "nan": ("The loss is nan for samples", "look at `dataset[17]`"),
}


@pytest.mark.parametrize("case", SAID)
def test_it_is_refused_by_all_workers_alike(case: str, told: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(told):
        for part in SAID[case]:
            assert part in of_rank[case].replace(f"rank {rank}", "rank"), of_rank[case]


@pytest.mark.parametrize("case", list(pipelined.DONE))
def test_it_trains_to_the_same_bits_as_in_one_process(
    case: str, told: list[dict[str, str]], whole: dict[str, str]
) -> None:
    assert told[0][case] == told[1][case] == whole[case]


def test_workers_that_make_no_whole_copies_are_refused() -> None:
    with pytest.raises(ShoalError, match="3 workers cannot hold copies of 2 parts"):
        make_mesh(3, pipeline(2))
