"""Keeps states on disk: durable when it says so, verified when read, and never in the way of training."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from shoal.checkpoint import disk, read
from shoal.checkpoint.layout import MAX_FILE_BYTES
from shoal.checkpoint.read import Entry, Loaded
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.state import State
from shoal.checkpoint.write import Draft, draft, pick_doomed, write_checkpoint
from shoal.spec.errors import BugError, ShoalError, UserError

LOCK_SECONDS = 30.0

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Told what happened: `checkpoint_saved`, `checkpoint_failed`, `checkpoint_skipped`, `checkpoint_not_removed`."""


class Saving:
    """A save under way. Training need not look at it: failures are also told to `on_event`.

    `path` is set once the checkpoint is durable, `error` if it could not be saved; `seconds` is what writing took.
    """

    def __init__(self, step: int, num_bytes: int) -> None:
        self.step = step
        self.num_bytes = num_bytes
        self.path: Path | None = None
        self.error: ShoalError | None = None
        self.seconds = 0.0
        self._ended = threading.Event()

    @property
    def is_durable(self) -> bool:
        return self.path is not None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it ended, durable or failed; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def end(self, seconds: float) -> None:
        """Called once, by the store that writes it."""
        self.seconds = seconds
        self._ended.set()


class Store(Protocol):
    """Keeps states. `testing/store_contract.py` says in tests what each method promises."""

    def save(self, state: State, *, wait: bool = False) -> Saving: ...
    def load(self, step: int | None = None) -> Loaded: ...
    def list(self) -> tuple[Entry, ...]: ...
    def verify(self, step: int) -> Entry: ...
    def close(self) -> None: ...


class FolderStore:
    """A folder of checkpoints `step-000000100/`, each a few safetensors files and a manifest.

    Writing goes on in the background, one save at a time: a save while another is being written first waits for it,
    so none is dropped and memory holds at most one copy of the state. `keep` is how many are kept (None: all); older
    ones go only after the new one is durable. Several processes may read; writers take turns through a lock.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int | None = 3,
        *,
        on_event: OnEvent = lambda kind, data: None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"keep={keep} would keep no checkpoint.", hint="use keep=1 or more, or keep=None for all")
        self.folder = Path(folder)
        self.keep = keep
        self._on_event = on_event
        self._max_file_bytes = max_file_bytes
        self._staging = Staging()
        self._saving: Saving | None = None
        self._turn = threading.Lock()
        self._clear_leftovers()

    def save(self, state: State, *, wait: bool = False) -> Saving:
        """Save a state. Returns once it is copied; the caller may then change its tensors and facts.

        A state that can never be saved (a sparse tensor, a fact that is not plain) is a UserError. Whatever the
        machine does (full disk, no permission, no memory) is not raised: it ends up in `Saving.error` and in
        `on_event`, the checkpoints before it stay whole, and the next save tries again.
        """
        with self._turn:
            self._wait()
            self._saving = saving = self._start(state)
        if wait:
            saving.wait()
        return saving

    def load(self, step: int | None = None) -> Loaded:
        """The state saved last, or at `step`, that proves whole; says which were skipped and why.

        Every byte is verified. Tensors are on the CPU and belong to the caller. UserError if there is none.
        """
        self._wait()
        loaded = read.load(self.folder, step)
        for item in loaded.skipped:
            self._tell("checkpoint_skipped", {"path": str(item.path), "reason": item.reason})
        return loaded

    def list(self) -> tuple[Entry, ...]:
        """What is there, the last saved first; manifests and sizes are checked, digests are not."""
        return read.list_checkpoints(self.folder)

    def verify(self, step: int) -> Entry:
        """Check every byte of the checkpoint of a step; `problem` of the answer is empty if it is whole."""
        for entry in self.list():
            if entry.step == step:
                return read.verify(entry)
        raise UserError(
            f"There is no checkpoint of step {step} in {self.folder}.", hint="`list()` names those there are"
        )

    def close(self) -> None:
        """Wait for the save under way and free the staging memory."""
        with self._turn:
            self._wait()
            self._staging = Staging()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def _start(self, state: State) -> Saving:
        planned = draft(state, self._max_file_bytes)
        saving = Saving(planned.step, planned.num_bytes)
        try:
            data = self._staging.copy(planned.plans, state.tensors)
        except MemoryError as error:
            self._fail(saving, error)
            saving.end(0.0)
            return saving
        # Not a daemon: a process that ends in the normal way finishes its last save.
        writer = threading.Thread(target=self._write, args=(saving, planned, data), name="shoal-checkpoint")
        try:
            writer.start()
        except (
            RuntimeError
        ):  # no thread to be had, as when the interpreter is about to end: then not in the background
            self._write(saving, planned, data)
        return saving

    def _write(self, saving: Saving, planned: Draft, data: Sequence[memoryview]) -> None:
        started = time.perf_counter()
        try:
            disk.make_folder(self.folder)
            with disk.locked(self.folder, LOCK_SECONDS) as held:
                if held:
                    disk.clear_leftovers(self.folder)
                saving.path = write_checkpoint(self.folder, planned, data)
                self._tell_saved(saving, time.perf_counter() - started)
                self._remove_old()
        except Exception as error:
            self._fail(saving, error)
        finally:
            saving.end(time.perf_counter() - started)

    def _tell_saved(self, saving: Saving, seconds: float) -> None:
        facts = {"step": saving.step, "path": str(saving.path), "num_bytes": saving.num_bytes, "seconds": seconds}
        self._tell("checkpoint_saved", facts)

    def _fail(self, saving: Saving, error: Exception) -> None:
        saving.error = _as_shoal_error(error, saving.step, self.folder)
        words = {"message": saving.error.message, "why": saving.error.why, "hint": saving.error.hint}
        self._tell("checkpoint_failed", {"step": saving.step, "path": str(self.folder), **words})

    def _remove_old(self) -> None:
        for entry in pick_doomed(self.list(), self.keep):
            try:
                disk.discard(entry.path)
            except OSError as error:
                why, hint = disk.explain(error)
                self._tell("checkpoint_not_removed", {"path": str(entry.path), "why": why, "hint": hint})

    def _clear_leftovers(self) -> None:
        """Remove what a writer that died left behind, unless a live one is at work or we may not write here."""
        if not self.folder.is_dir():
            return
        with suppress(UserError, OSError), disk.locked(self.folder, 0.0) as held:
            if held:
                disk.clear_leftovers(self.folder)

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        try:
            self._on_event(kind, data)
        except Exception:  # the listener's fault: it must not turn a durable save into a failed one
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _as_shoal_error(error: Exception, step: int, folder: Path) -> ShoalError:
    message = f"The checkpoint of step {step} could not be saved in {folder}; training goes on."
    if isinstance(error, UserError):
        return UserError(message, why=f"{error.message} {error.why}", hint=error.hint, step=step)
    if isinstance(error, OSError):
        why, hint = disk.explain(error)
        return UserError(message, why=why, hint=hint, step=step)
    if isinstance(error, MemoryError):
        return UserError(message, why=str(error), hint="use a machine with more memory, or fewer workers", step=step)
    return BugError(message, why=f"{type(error).__name__}: {error}", hint="please report this", step=step)
