"""Where the numbers of a run can go: one small object for each tool, and the words that name them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from shoal.files import mask
from shoal.observe.runs import RunInfo
from shoal.observe.scalars import Scalars
from shoal.spec.errors import UserError
from shoal.spec.event import Event


class Exporter(Protocol):
    """Takes what a run measured to one tool. It may raise anything: whoever calls it tells, and tries again."""

    def write(self, rows: Sequence[Scalars]) -> None:
        """Take these numbers. After a failure it is called again with the same ones, and those that came since."""

    def event(self, event: Event) -> None:
        """Something has happened. What a tool has no place for is passed over."""

    def close(self, status: str) -> None:
        """The last call: `status` is what has become of the run, `running` where it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One tool. `packages` must be there, and come with `extra`; `is_live`: it asks, or is told, only of now."""

    module: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    place: str = ""
    is_live: bool = False

    def open(self, run: RunInfo, place: str) -> Exporter:
        """Begin. Raises UserError where that cannot work."""
        module = import_module(f"shoal.observe.exporters.{self.module}")
        make: Callable[[RunInfo, str], Exporter] = module.open_exporter
        return make(run, place)


KINDS = {
    "csv": Kind(module="csv_file", place="FILE"),
    "parquet": Kind(module="parquet", packages=("pyarrow",), extra="features", place="FILE"),
    "tensorboard": Kind(module="tensorboard", packages=("tensorboard",), extra="tensorboard", place="FOLDER"),
    "wandb": Kind(module="wandb", packages=("wandb",), extra="wandb", place="ENTITY/PROJECT"),
    "mlflow": Kind(module="mlflow", packages=("mlflow", "sqlalchemy"), extra="mlflow", place="URI"),
    "trackio": Kind(module="trackio", packages=("trackio",), extra="trackio", place="PROJECT"),
    "prometheus": Kind(
        module="prometheus", packages=("prometheus_client",), extra="prometheus", place="HOST:PORT", is_live=True
    ),
    "opentelemetry": Kind(
        module="opentelemetry",
        packages=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        extra="opentelemetry",
        place="URL",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where numbers are to go: a kind, and what followed its colon. As text it is without secrets."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return mask(f"{self.kind}:{self.place}" if self.place else self.kind)


def parse_target(text: str) -> Target:
    """What `--to` names, checked without importing anything. Raises UserError for what cannot be."""
    name, _, place = text.partition(":")
    if name not in KINDS:
        from shoal.verb_parser import unknown

        raise unknown(mask(name), "place to send to", KINDS, f"use one of: {', '.join(KINDS)}")
    kind = KINDS[name]
    for package in kind.packages:
        if not _is_there(package):
            raise UserError(
                f"{name} is not installed.",
                why=f"there is no module named {package!r}",
                hint=f"run `pip install 'shoal[{kind.extra}]'`, or leave out `--to {name}`",
            )
    if "\0" in place or "\n" in place:
        raise UserError(f"--to {text!r} is not a place.", hint=f"for example: `--to {name}`")
    return Target(kind=name, place=place)


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of it is missing
        return False
