"""Every error shoal raises: what happened, where, why, and what to do next."""

from collections.abc import Iterable
from typing import Any, Self


class ShoalError(Exception):
    """The root of the tree. The message says what happened; `why` and `hint` say the rest.

    `rank`, `step` and `generation` place it in a run, `where` is a `file:line` in the user's code, and
    `remote_traceback` is the text of a traceback from another process. All of them survive pickling.

    Where it is known what is at fault, `cause` is the word for it (docs/glossary.md) and `ranks` are those who did
    it: the error itself may be raised on every rank.
    """

    exit_code = 1
    cause: str = ""
    ranks: tuple[int, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        why: str = "",
        hint: str = "",
        where: str = "",
        rank: int | None = None,
        step: int | None = None,
        generation: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.hint = hint
        self.where = where
        self.rank = rank
        self.step = step
        self.generation = generation
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {k: v for k, v in vars(self).items() if k != "message"})

    def at(self, *, rank: int | None = None, step: int | None = None, where: str = "") -> Self:
        """Fill in the place where it happened, keeping what is already known."""
        self.rank = rank if self.rank is None else self.rank
        self.step = step if self.step is None else self.step
        self.where = self.where or where
        return self

    def blame(self, cause: str, ranks: Iterable[int]) -> Self:
        """Say what is at fault, and whose it is."""
        self.cause, self.ranks = cause, tuple(ranks)
        return self

    def render(self) -> str:
        """The error as people read it: one fact a line."""
        named = [("rank", self.rank), ("step", self.step)]
        place = [f"{name} {value}" for name, value in named if value is not None]
        place += [self.where] if self.where else []
        lines = [f"error: {self.message}"]
        if place:
            lines.append(f"   at: {', '.join(place)}")
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"   do: {self.hint}")
        return "\n".join(lines)


def _rebuild(cls: type[ShoalError], message: str, facts: dict[str, Any]) -> ShoalError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.message = message
    vars(error).update(facts)
    return error


class UserError(ShoalError):
    """Fix your job: something in what was asked cannot work."""

    exit_code = 2


class PlanError(ShoalError):
    """No plan fits the machines there are."""

    exit_code = 3


class WorkerError(ShoalError):
    """The user's code failed in a worker."""


class MemberLost(ShoalError):
    """A member of the World is gone. Survivors go on without it; the step is redone.

    `ranks` names the missing ones, as far as the one who raises knows.
    """

    exit_code = 4


class Preempted(ShoalError):
    """The run was asked to give its place to another."""

    exit_code = 5


class Retryable(ShoalError):
    """What failed may work in a new process: a worker of an elastic run that raises this is replaced.

    Raise it, or a class derived from it, for what comes and goes: a server that does not answer, a lost connection.
    In `shoal.map` it is the item that is tried again. In a run that is not elastic it is an error like any other.
    """

    exit_code = 75


class BugError(ShoalError):
    """Our fault. Please report it."""

    exit_code = 70
