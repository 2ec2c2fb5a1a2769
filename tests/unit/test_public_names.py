"""What users may rely on, pinned: a change here is a change of the interface, and belongs in CHANGELOG.md."""

import inspect

import pytest

import shoal
from shoal.spec.errors import ShoalError

NAMES = [
    "BugError",
    "Client",
    "MemberLost",
    "PlanError",
    "Preempted",
    "Retryable",
    "ShoalError",
    "Trainer",
    "UserError",
    "WorkerError",
    "__version__",
    "all_reduce",
    "diloco",
    "group",
    "launch",
    "local",
    "log",
    "map",
    "open_run",
    "pipeline",
    "runs",
    "sharded",
    "tensor",
    "testing",
]

TRAINER = {
    "__init__": (
        "self, model, loss, optimizer, dataset, *, batch_size, scheduler=None, collate=None, init_from=None, "
        "strict=True, run_dir=None, resume=False, **settings"
    ),
    "averaged": "self",
    "close": "self",
    "digest": "self",
    "evaluate": "self, dataset, loss=None",
    "fit": "self, *, epochs=None, steps=None",
    "predict": "self, dataset, forward=call_model",
    "save": "self, *, wait=False",
    "step": "self, batch",
}

ATTRIBUTES = [
    "device",
    "ledger",
    "model",
    "optimizer",
    "place",
    "rank",
    "run_dir",
    "scheduler",
    "settings",
    "world_size",
]

LAUNCH = (
    "function, num_workers=2, args=(), kwargs=None, *, "
    "env=None, run_dir=None, threads_per_worker=None, is_quiet=False, "
    "engine=None, address=None, hosts=None, master=None, options=None"
)

MAP = (
    "function, items, workers=None, *, retries=2, timeout_seconds=None, on_error='raise', is_lazy=False, "
    "env=None, run_dir=None, threads_per_worker=None, is_quiet=False"
)

EXIT_CODES = {
    "ShoalError": 1,
    "WorkerError": 1,
    "UserError": 2,
    "PlanError": 3,
    "MemberLost": 4,
    "Preempted": 5,
    "Retryable": 75,
    "BugError": 70,
}


class Name(str):
    """Shows as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def signature_of(function) -> str:
    """A signature without types, and with functions by their names."""
    shown = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=Name(default.__name__) if inspect.isfunction(default := parameter.default) else default,
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(shown))[1:-1]


def test_the_names_of_the_package():
    assert sorted(shoal.__all__) == NAMES
    assert dir(shoal) == sorted(shoal.__all__)
    for name in NAMES:
        assert getattr(shoal, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trainr"):
        _ = shoal.Trainr  # type: ignore[attr-defined]


def test_the_methods_of_the_trainer():
    public = [
        name for name, value in vars(shoal.Trainer).items() if name[0] != "_" and not isinstance(value, property)
    ]
    assert {name: signature_of(getattr(shoal.Trainer, name)) for name in ["__init__", *public]} == TRAINER
    for name in ("__iter__", "__enter__", "__exit__"):
        assert hasattr(shoal.Trainer, name)


def test_the_attributes_of_a_trainer(run_dir):
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(8, 2)
    with shoal.Trainer(model, lambda m, x: m(x).mean(), optimizer, data, batch_size=4, run_dir=run_dir) as trainer:
        properties = [name for name, value in vars(shoal.Trainer).items() if isinstance(value, property)]
        assert sorted(name for name in [*vars(trainer), *properties] if not name.startswith("_")) == ATTRIBUTES
        assert trainer.model is model
        assert trainer.optimizer is optimizer


def test_launch():
    assert signature_of(shoal.launch) == LAUNCH


def test_group():
    assert signature_of(shoal.group) == "ranks=None, *, transport='auto', timeout_seconds=300.0"


def test_log():
    assert signature_of(shoal.log) == "values=None, /, *, step=None, **more"


def test_map():
    assert signature_of(shoal.map) == MAP


def test_errors_form_one_tree_and_have_exit_codes():
    errors = {name: getattr(shoal, name) for name in EXIT_CODES}
    assert {name: error.exit_code for name, error in errors.items()} == EXIT_CODES
    assert all(issubclass(error, ShoalError) for error in errors.values())


def test_the_version_is_one_of_this_package():
    assert shoal.__version__.count(".") >= 2
