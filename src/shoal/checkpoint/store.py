"""Keeps states on disk or by URL: durable when it says so, verified when read, and never in the way of training."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from shoal.checkpoint import disk, listing, place, read, remote
from shoal.checkpoint import fence as fences
from shoal.checkpoint.layout import MAX_FILE_BYTES
from shoal.checkpoint.listing import Entry
from shoal.checkpoint.read import Loaded
from shoal.checkpoint.saving import Retries, Saving, as_shoal_error, may_work_later
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.state import State
from shoal.checkpoint.write import Draft, draft, pick_doomed, write_checkpoint
from shoal.files import Place, Url, locate
from shoal.spec.errors import UserError

LOCK_SECONDS = 30.0

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Told what happened: `checkpoint_saved`, `checkpoint_failed`, `checkpoint_fenced`, `checkpoint_skipped`,
`checkpoint_not_removed`, `fence_failed`."""


class Store(Protocol):
    """Keeps states. `testing/store_contract.py` says in tests what each method promises."""

    def save(self, state: State, *, wait: bool = False) -> Saving: ...
    def fence(self, generation: int, *, wait: bool = True) -> bool: ...
    def load(self, step: int | None = None) -> Loaded: ...
    def list(self) -> tuple[Entry, ...]: ...
    def verify(self, step: int) -> Entry: ...
    def close(self) -> None: ...


class FolderStore:
    """A folder of checkpoints `step-000000100/`, each a few safetensors files and a manifest.

    Writing goes on in the background, one save at a time: a save while another is being written first waits for it,
    so none is dropped and memory holds at most one copy of the state. `keep` is how many are kept (None: all); older
    ones go only after the new one is durable. Several processes may read; writers take turns through a lock.

    A save that failed is tried again in the background, with growing pauses, until it is durable, a newer save takes
    its place, or the store is closed (which tries once more). The state it holds is the newest there is.

    `folder` may be a URL (`s3://bucket/run/checkpoints`): docs/files.md says what such a store can promise. Writers
    there do not take turns: the one that comes last takes over, and saves of the other fail from then on.

    `generation` is that of the World this writer belongs to; None takes the one in force in the folder now. `fence`
    moves it on. Once another has fenced a newer one, saves here are refused (`checkpoint_fenced`) and leave nothing.
    """

    def __init__(
        self,
        folder: str | Place,
        keep: int | None = 3,
        *,
        generation: int | None = None,
        on_event: OnEvent = lambda kind, data: None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"keep={keep} would keep no checkpoint.", hint="use keep=1 or more, or keep=None for all")
        self.folder: Place = locate(folder)
        self.keep = keep
        self.generation = self._newest_generation() if generation is None else generation
        self._wanted: int | None = None
        self._trying = threading.Lock()
        self._on_event = on_event
        self._max_file_bytes = max_file_bytes
        self._staging = Staging()
        self._saving: Saving | None = None
        self._turn = threading.Lock()
        self._writer = f"{socket.gethostname()} pid {os.getpid()} {os.urandom(4).hex()}"
        self._has_claimed = False
        self._clear_leftovers()

    def save(self, state: State, *, wait: bool = False) -> Saving:
        """Save a state. Returns once it is copied; the caller may then change its tensors and facts.

        A state that can never be saved (a sparse tensor, a fact that is not plain) is a UserError. Whatever the
        machine does (full disk, no permission, no memory) is not raised: it ends up in `Saving.error` and in
        `on_event`, the checkpoints before it stay whole, and it is tried again until the next save or `close`.
        """
        planned = draft(state, self._max_file_bytes)
        with self._turn:
            self._settle(Retries.stop)
            self._saving = saving = self._start(planned, state)
        if wait:
            saving.wait()
        return saving

    def fence(self, generation: int, *, wait: bool = True) -> bool:
        """Belong to `generation` from now on, and let no older one commit here any more. True if that is durable now.

        Called by the one who saves for a new World, with a number that grows for the life of the folder (also when a
        run is resumed: `fence.newest_generation` tells the last). Never waits for a save under way: that is finished
        first. Without `wait` it does not wait for the disk either. A disk that refuses is told as `fence_failed`. In
        every case no save of the new generation counts before its fence does. Raises `Stale` if a newer generation
        was there first; without `wait` the next save tells that.
        """
        self._wanted = generation
        if not wait:
            threading.Thread(target=self._draw_soon, name="shoal-fence").start()
            return False
        if not self._trying.acquire(blocking=False):
            return False
        try:
            return self._move_on()
        finally:
            self._trying.release()

    def _draw_soon(self) -> None:
        with self._trying, suppress(fences.Stale):
            self._move_on()

    def load(self, step: int | None = None) -> Loaded:
        """The state saved last, or at `step`, that proves whole; says which were skipped and why.

        Every byte is verified. Tensors are on the CPU and belong to the caller. UserError if there is none.
        """
        self.wait()
        loaded = read.load(self.folder, step)
        for item in loaded.skipped:
            self._tell("checkpoint_skipped", {"path": str(item.path), "reason": item.reason})
        return loaded

    def list(self) -> tuple[Entry, ...]:
        """What is there, the last saved first; manifests and sizes are checked, digests are not."""
        return listing.list_checkpoints(self.folder)

    def verify(self, step: int) -> Entry:
        """Check every byte of the checkpoint of a step; `problem` of the answer is empty if it is whole."""
        for entry in self.list():
            if entry.step == step:
                return listing.verify(entry)
        raise UserError(
            f"There is no checkpoint of step {step} in {self.folder}.", hint="`list()` names those there are"
        )

    def close(self) -> None:
        """Wait for the save under way, try one that failed for the last time, and free the staging memory."""
        with self._turn:
            self._settle(Retries.finish)
            self._staging = Staging()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until the save under way is on disk, or has failed once."""
        if self._saving is not None:
            self._saving.wait()

    def _settle(self, end: Callable[[Retries], None]) -> None:
        """Wait for a try under way, and end those that would follow."""
        if self._saving is not None:
            self.wait()
            end(self._saving.retries)
            self._saving.wait_settled()

    def _start(self, planned: Draft, state: State) -> Saving:
        saving = Saving(planned.step, planned.num_bytes)
        try:
            data = self._staging.copy(planned.plans, state.tensors)
        except MemoryError as error:
            self._fail(saving, error)
            saving.end(0.0)
            saving.settle()
            return saving
        # Not a daemon: a process that ends in the normal way finishes its last save.
        writer = threading.Thread(target=self._write, args=(saving, planned, data), name="shoal-checkpoint")
        try:
            writer.start()
        except (
            RuntimeError
        ):  # no thread to be had, as when the interpreter is about to end: then not in the background
            saving.retries.stop()
            self._write(saving, planned, data)
        return saving

    def _write(self, saving: Saving, planned: Draft, data: Sequence[memoryview]) -> None:
        """Try until it is durable or nobody wants it any more."""
        try:
            self._try(saving, planned, data)
            while may_work_later(saving.error) and saving.retries.pause():
                self._try(saving, planned, data)
        finally:
            saving.settle()

    def _try(self, saving: Saving, planned: Draft, data: Sequence[memoryview]) -> None:
        started = time.perf_counter()
        with self._trying:
            try:
                self._commit(saving, planned, data)
            except Exception as error:
                self._fail(saving, self._cause(error))
            finally:
                saving.end(time.perf_counter() - started)
            with suppress(fences.Stale):  # the next save tells
                self._move_on()

    def _commit(self, saving: Saving, planned: Draft, data: Sequence[memoryview]) -> None:
        started = time.perf_counter()
        place.make_folder(self.folder)
        self._draw_fence()
        fences.check(self.folder, self.generation)
        with self._alone(LOCK_SECONDS) as is_alone:
            if is_alone:
                place.clear_leftovers(self.folder, self.generation)
            path = write_checkpoint(self.folder, planned, data, self.generation, self._check_claim)
            saving.error, saving.path = None, path
            self._tell_saved(saving, time.perf_counter() - started)
            self._remove_old()

    @contextmanager
    def _alone(self, timeout_seconds: float) -> Iterator[bool]:
        """Be the only one who writes or tidies here; yields False where nobody can tell."""
        if isinstance(self.folder, Path):
            with disk.locked(self.folder / fences.lock_name(self.folder), timeout_seconds) as held:
                yield held
            return
        if not self._has_claimed:
            remote.claim(self.folder, self._writer)
            self._has_claimed = True
        self._check_claim()
        yield True

    def _check_claim(self) -> None:
        if isinstance(self.folder, Url):
            remote.check_claim(self.folder, self._writer)

    def _move_on(self) -> bool:
        try:
            self._draw_fence()
        except OSError as error:
            why, hint = disk.explain(error)
            facts = {"path": str(self.folder), "generation": self._wanted, "why": why, "hint": hint}
            self._tell("fence_failed", facts)
        return self._wanted is None

    def _draw_fence(self) -> None:
        if self._wanted is not None:
            fences.draw(self.folder, self._wanted, self._known)
            self.generation, self._wanted = self._wanted, None

    def _known(self) -> Iterator[str]:
        return (entry.identity for entry in self.list() if entry.identity and not entry.is_stale)

    def _newest_generation(self) -> int:
        try:
            return fences.newest_generation(self.folder)
        except OSError:  # reading it will say so too, in better words
            return 0

    def _cause(self, error: Exception) -> Exception:
        """What a newer generation does to the files of an older one looks like a failing disk: say what it is."""
        try:
            fences.check(self.folder, self.generation)
        except fences.Stale as stale:
            return stale
        except OSError:
            pass
        return error

    def _tell_saved(self, saving: Saving, seconds: float) -> None:
        facts = {"step": saving.step, "path": str(saving.path), "num_bytes": saving.num_bytes, "seconds": seconds}
        self._tell("checkpoint_saved", facts)

    def _fail(self, saving: Saving, error: Exception) -> None:
        found = as_shoal_error(error, saving.step, self.folder)
        is_known = saving.error is not None and saving.error.why == found.why
        saving.error = found
        if is_known:  # tried again in vain
            return
        facts = {"step": saving.step, "path": str(self.folder)}
        facts |= {"message": found.message, "why": found.why, "hint": found.hint}
        if isinstance(error, fences.Stale):
            self._tell("checkpoint_fenced", {**facts, "generation": self.generation})
        else:
            self._tell("checkpoint_failed", facts)

    def _remove_old(self) -> None:
        """The save stands whatever happens here, and the next one tries again."""
        path: Place = self.folder
        try:
            fences.check(self.folder, self.generation)
            for entry in pick_doomed(self.list(), self.keep):
                path = entry.path
                place.discard(path)
        except OSError as error:
            why, hint = disk.explain(error)
            self._tell("checkpoint_not_removed", {"path": str(path), "why": why, "hint": hint})
        except (UserError, fences.Stale) as error:
            self._tell("checkpoint_not_removed", {"path": str(path), "why": error.message, "hint": error.hint})

    def _clear_leftovers(self) -> None:
        """Remove what a writer that died left behind, unless a live one is at work or we may not write here."""
        if not isinstance(self.folder, Path) or not self.folder.is_dir():
            return  # by URL the next save does it: who only reads must not take over
        with suppress(UserError, OSError), self._alone(0.0) as is_alone:
            if is_alone:
                place.clear_leftovers(self.folder, self.generation)

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        try:
            self._on_event(kind, data)
        except Exception:  # the listener's fault: it must not turn a durable save into a failed one
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
