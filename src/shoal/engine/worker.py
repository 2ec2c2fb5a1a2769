"""The first code of a worker: runs the user's program as `python` would, and tells the launcher how it failed.

Run by path, as `python worker.py CONTROL_FD WORLD_FD RANK STACKS KIND TARGET ...`, and importing nothing of shoal:
`--python` may name an interpreter that does not have it, and a `shoal.py` beside the user's script must not get in
the way. WORLD_FD is empty where the run is not elastic. STACKS is the file for stacks, if they may be asked for. KIND
says what TARGET is: `script` (a file), `module` (as with `python -m`), `program` (anything executable), or `call`
(descriptors of a pickled call and of the file for its result).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time

TYPE_CHECKING = False  # what typing would say; importing it costs more than all the rest here
if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import Any

SIGTERM = 15
STACK_SIGNAL = 45
"""SIGRTMIN + 11, which nothing we know of uses. On it, a worker writes down what all its threads are doing."""
_LOADER: Any = type(globals()["__loader__"])
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))


def main(control_fd: str, world_fd: str, rank: str, stacks_path: str, kind: str, target: str, *args: str) -> None:
    """Run what the arguments say. An exception of the program is reported and becomes an exit code."""
    end_with_parent()
    end_if_orphan(int(control_fd))
    control = Control(int(control_fd), int(rank))
    own_pipe("SHOAL_WORLD_FD", world_fd)
    faulthandler.enable()
    show_stacks_when_asked(stacks_path)
    prepare_for_torch()
    pid = os.getpid()
    atexit.register(let_gloo_finish, pid)
    try:
        RUN[kind](target, list(args))
    except SystemExit as error:
        if os.getpid() == pid:
            control.report_exit(error)
        raise
    except BaseException as error:
        # A child that the program forked is not the worker: it ends as it would without us.
        if os.getpid() != pid:
            raise
        leave(control.report(error))


def prepare_for_torch() -> None:
    """Have torch imported as `torch_finder.py` says, if it is at all. Nobody else can import what is loaded here."""
    if "torch" not in sys.modules:
        path = os.path.join(_PACKAGE, "engine", "torch_finder.py")
        module: Any = type(sys)("torch_finder")
        _LOADER(module.__name__, path).exec_module(module)
        sys.meta_path.insert(0, module.TorchFinder())


def show_stacks_when_asked(path: str) -> None:
    """Let the launcher see where we are, whatever we are doing. Where nothing can be written, it cannot."""
    if not path:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    except (OSError, ValueError, RuntimeError, AttributeError):  # a full disk, or a system without such signals
        return


def leave(code: int) -> None:
    """End as Python does, but for destructors: those of native libraries tend to abort or hang after a failure."""
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def let_gloo_finish(pid: int) -> None:
    """Let gloo's threads drop the tensors of their last work, which takes the interpreter, while there is one.

    A thread that asks for it during the end of Python is made to exit, which C++ answers with abort: scripts that did
    everything right die of it on a busy machine. It has finished when it sleeps though the interpreter is free.
    """
    if os.getpid() != pid or "torch.distributed" not in sys.modules:
        return
    deadline, before = time.monotonic() + 1.0, None
    while time.monotonic() < deadline:
        now = gloo_activity()
        if not now or (now == before and "R" not in {state for _, state, _ in now}):
            return
        before = now
        time.sleep(0.005)


def gloo_activity() -> list[tuple[str, str, str]]:
    """Id, state, and how often it slept, of each thread of gloo that works off calls. Only Linux tells."""
    found = []
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        try:
            with open(f"/proc/self/task/{thread}/status") as file:
                facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except OSError:  # it has just ended
            continue
        if facts.get("Name") == "pt_gloo_runloop":
            found.append((thread, facts.get("State", "")[:1], facts.get("voluntary_ctxt_switches", "")))
    return found


def end_with_parent(number: int = SIGTERM) -> None:
    """Have the kernel send this when the launcher dies. Where that cannot be had, the guard process suffices."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        sys.exit(128 + SIGTERM)


def end_if_orphan(control_fd: int) -> None:
    """The launcher may have died before the kernel was asked to tell us; then nobody reads our pipe."""
    import select

    poll = select.poll()
    poll.register(control_fd, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        sys.exit(128 + SIGTERM)


def run_script(path: str, args: list[str]) -> None:
    """Run a file as `python PATH ARGS` does."""
    pretend(os.path.dirname(os.path.realpath(path)), [path, *args])
    full_path = os.path.join(os.getcwd(), path)
    with open(full_path, "rb") as file:
        source = file.read()
    if path.endswith(".pyc") or source.startswith(b"PK\x03\x04"):
        import runpy

        runpy.run_path(path, run_name="__main__")
    else:
        exec(compile(source, full_path, "exec", dont_inherit=True), vars(new_main(full_path)))


def run_module(name: str, args: list[str]) -> None:
    """Run a module as `python -m NAME ARGS` does."""
    from importlib.util import find_spec

    pretend(os.getcwd(), ["-m", *args])
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(name + ".__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and loader is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    sys.argv[0] = spec.origin or name
    module = new_main(spec.origin)
    module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, spec.loader
    exec(code, vars(module))


def run_program(path: str, args: list[str]) -> None:
    """Become another program."""
    # It does not inherit the pipes, so it must not be told about them.
    del os.environ["SHOAL_CONTROL_FD"], os.environ["SHOAL_WORLD_FD"], os.environ["SHOAL_CONTROL_PID"]
    try:
        os.execv(path, [path, *args])
    except OSError as error:
        sys.exit(f"cannot execute {path}: {error.strerror}")


def run_call(payload_fd: str, args: list[str]) -> None:
    """Call a pickled function and write its pickled result.

    Both descriptors were made by the process that called `shoal.launch` and inherited from it; no name in a file
    system leads to them.
    """
    import json
    import pickle

    header, _, body = read_all(int(payload_fd)).partition(b"\n")
    facts = json.loads(header)
    pretend("", facts["argv"])
    sys.path[:] = facts["path"]
    new_main(None)
    # A module that calls `shoal.launch` while it is imported would start workers without end; `launch` looks at this.
    os.environ["SHOAL_LOADING_CALL"] = str(os.getpid())
    function, positional, named = pickle.loads(body)
    del os.environ["SHOAL_LOADING_CALL"], body
    result = memoryview(dump_result(function(*positional, **named)))
    while result:
        result = result[os.write(int(args[0]), result) :]


def dump_result(value: object) -> bytes:
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    try:
        return bytes(dumps(value))
    except Exception as error:
        from shoal.spec.errors import UserError

        raise UserError(
            f"The function returned a {type(value).__name__} that cannot be sent back.",
            why=f"{type(error).__name__}: {error}",
            hint="return plain values, arrays or tensors",
        ) from error


RUN = {"script": run_script, "module": run_module, "program": run_program, "call": run_call}


def pretend(first_path: str, argv: list[str]) -> None:
    """Make `sys` look as if we had never been there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first_path
    sys.argv[:] = argv


def new_main(path: str | None) -> ModuleType:
    """An empty `__main__`, so that pickling and processes spawned by the program find the program and not us."""
    module = type(sys)("__main__")
    vars(module)["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    if path is not None:
        vars(module).update(__file__=path, __cached__=None, __loader__=_LOADER("__main__", path))
    sys.modules["__main__"] = module
    return module


def own_pipe(name: str, fd: str) -> None:
    """Say in a variable which descriptor a pipe is; the variable is set in any case, so that no outer one is seen."""
    os.environ[name] = fd
    if fd:
        # Programs that the worker starts could not know what it is.
        os.set_inheritable(int(fd), False)


class Control:
    """The pipe to the launcher. Ours is a copy: whoever else uses the pipe may close theirs."""

    def __init__(self, fd: int, rank: int) -> None:
        self.fd = os.dup(fd)
        self.rank = rank
        own_pipe("SHOAL_CONTROL_FD", str(fd))
        os.environ["SHOAL_CONTROL_PID"] = str(os.getpid())

    def report(self, error: BaseException) -> int:
        """Say on the pipe and on stderr what went wrong; returns the exit code."""
        trace = error.__traceback__ = users_part(error.__traceback__)
        errors = sys.modules.get("shoal.spec.errors")
        if errors is not None and isinstance(error, errors.ShoalError):
            return self.report_ours(error)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        facts = {"message": text_of(error), "exit_code": code, "step": getattr(error, "shoal_step", None)}
        self.send(error, facts, place_of(error))
        sys.excepthook(type(error), error, trace)
        return code

    def report_ours(self, error: Any) -> int:
        """An error that says itself what to do is shown without a traceback; the launcher still gets one.

        A mistake in what was asked is most often made by all workers: the launcher shows it once, and logs it for us.
        """
        error.at(rank=self.rank, where=place_of(error))
        facts = {name: getattr(error, name) for name in ("message", "why", "hint", "step", "exit_code")}
        errors = sys.modules["shoal.spec.errors"]
        if getattr(error, "cause", ""):
            facts |= {"cause": error.cause, "ranks": list(error.ranks)}
        facts["is_retryable"] = isinstance(error, getattr(errors, "Retryable", ()))
        facts["is_for_log"] = isinstance(error, getattr(errors, "UserError", ())) and not facts["is_retryable"]
        self.send(error, facts, error.where)
        sys.stdout.flush()
        if not facts["is_for_log"]:
            sys.stderr.write(error.render() + "\n")
        return int(error.exit_code)

    def report_exit(self, error: SystemExit) -> None:
        """Say where the program ended itself, unless it ended well. Python does the rest."""
        if error.code not in (None, 0):
            error.__traceback__ = users_part(error.__traceback__)
            message = error.code if isinstance(error.code, str) else f"exit code {error.code}"
            code = error.code if isinstance(error.code, int) else 1
            self.send(error, {"message": message, "exit_code": code & 0xFF}, place_of(error))

    def send(self, error: BaseException, facts: dict[str, Any], where: str) -> None:
        import json
        import traceback

        where_module = sys.modules.get("shoal.spec.where")
        if where_module is not None:
            text = where_module.format_error(error)  # without the trainer's frames
        else:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        data = {"type": type(error).__qualname__, "where": where, "traceback": text[-20000:], **facts}
        data["message"] = str(data["message"])[:4000]
        event = {"kind": "error", "time": time.time(), "rank": self.rank, "step": facts.get("step"), "data": data}
        send_all(self.fd, json.dumps(event).encode() + b"\n")


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our own frames, which come before the program's."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame in the user's own code, or of the innermost at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shorten(error.filename)}:{error.lineno}"
    trace, place = error.__traceback__, ("", 0)
    while trace is not None:
        frame = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        place = frame if is_users(frame[0]) or not is_users(place[0]) else place
        trace = trace.tb_next
    return f"{shorten(place[0])}:{place[1]}" if place[0] else ""


def is_users(filename: str) -> bool:
    if filename == getattr(sys.modules["__main__"], "__file__", None):
        return True
    # `<string>` is code that a library made, such as the `__init__` of a dataclass.
    is_library = filename.startswith(("<frozen", "<string>", _PACKAGE, _LIBRARY)) or "-packages" + os.sep in filename
    return bool(filename) and not is_library


def shorten(path: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return path[len(here) :] if path.startswith(here) else path


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # a user's __str__ may do anything
        return f"<no text: {type(failure).__name__}>"


def read_all(fd: int) -> bytes:
    # Every worker reads the same descriptor, so nobody may move its position.
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)


def send_all(fd: int, data: bytes) -> None:
    """Write everything, waiting up to 5 s at a time for a slow reader; gives up where nobody reads."""
    import select

    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            if not select.select([], [fd], [], 5)[1]:
                return
        except OSError:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
