"""From what the user named to the command of a worker. Mistakes are found here, once, before anything starts."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from shoal.engine.engine import CONTROL_FD, PYTHON, WORKER_FILE, WORLD_FD
from shoal.spec.errors import UserError
from shoal.spec.job import Job


def entry_of(job: Job) -> tuple[str, ...]:
    """What `worker.py` is to run: kind, target, arguments. Raises UserError where it cannot work.

    The source is compiled here, so that a syntax error is shown once and not by every worker. With another
    interpreter, which may know other syntax and other modules, that is left to the workers.
    """
    is_ours = job.python is None
    if job.module is not None:
        if is_ours:
            check_module(job.module, job.working_dir)
        return ("module", job.module, *job.args)
    path = os.path.join(job.working_dir, job.script or "")
    check_file(job.script or "", path)
    if is_program(path):
        return ("program", os.path.abspath(path), *job.args)
    if is_ours:
        check_syntax(path)
    return ("script", job.script or "", *job.args)


def command_of(
    python: str, rank: int, entry: Sequence[str], *, is_elastic: bool = False, stacks_path: str = ""
) -> tuple[str, ...]:
    """The command line of one worker. One of an elastic run is told who takes part."""
    return (python, WORKER_FILE, CONTROL_FD, WORLD_FD if is_elastic else "", str(rank), stacks_path, *entry)


def script_of(command: Sequence[str]) -> str:
    """The script in the command line of a worker, as it was named; empty where it runs something else."""
    kind, *rest = command[6:] if WORKER_FILE in command[1:2] else ("",)
    return rest[0] if kind in ("script", "program") and rest else ""


def stacks_file(run_dir: str, rank: int) -> str:
    """Where a worker writes its stacks when it is asked for them."""
    return os.path.join(run_dir, "stacks", f"{rank}.txt")


def find_python(name: str | None) -> str:
    """The interpreter for workers: the engine's own on their machine, or the full path of the one the user named."""
    if name is None:
        return PYTHON
    from shutil import which

    found = which(name)
    if found is None:
        is_file = os.path.isfile(name)
        raise UserError(
            f"Cannot run Python as {name!r}.",
            why="the file is not executable" if is_file else "there is no such program on the PATH",
            hint="give `--python` the path of an interpreter, such as `.venv/bin/python`",
        )
    return os.path.abspath(found)


def check_file(name: str, path: str) -> None:
    """Raise UserError unless `path` is a file that can be read."""
    if os.path.isdir(path):
        has_main = os.path.isfile(os.path.join(path, "__main__.py"))
        main = os.path.join(name, "__main__.py")
        raise UserError(
            f"{name!r} is a folder, not a script.",
            hint=f"run `{main}`" if has_main else "name the file in it that starts the training",
        )
    if not os.path.exists(path):
        raise UserError(
            f"There is no script {name!r}.",
            why=f"looked for {os.path.abspath(path)}",
            hint=suggest_script(name, os.path.dirname(path) or "."),
        )
    if not os.access(path, os.R_OK):
        raise UserError(
            f"The script {name!r} cannot be read.", why="its permissions forbid it", hint=f"chmod u+r {name}"
        )


def suggest_script(name: str, folder: str) -> str:
    """What the user may have meant by a script that is not there."""
    from difflib import get_close_matches

    try:
        files = [file for file in os.listdir(folder) if file.endswith(".py")]
    except OSError:
        files = []
    close = get_close_matches(os.path.basename(name), files, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{os.path.join(os.path.dirname(name), close[0])}`?"
    if os.sep not in name and not name.endswith(".py"):
        return f"check the path; a module is started with `-m {name}`"
    return "check the path and the folder you are in"


def is_program(path: str) -> bool:
    """Whether a file is to be executed as it is: a binary or a script of another language."""
    if path.endswith((".py", ".pyw", ".pyc", ".pyz")) or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        first = file.readline(256)
    return first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)


def check_syntax(path: str) -> None:
    """Raise UserError where a Python file does not compile."""
    with open(path, "rb") as file:
        source = file.read()
    if path.endswith(".pyc") or source.startswith(b"PK\x03\x04"):
        return
    import warnings

    try:
        with warnings.catch_warnings():
            # The workers compile it again and say these themselves.
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise syntax_error(error, path) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{path} is not a Python file.",
            why=str(error) or type(error).__name__,
            hint="name the script; a program of another kind must be executable",
        ) from None


def syntax_error(error: SyntaxError, path: str) -> UserError:
    line = (error.text or "").rstrip("\n")
    shown = line.lstrip()
    caret = " " * max(0, (error.offset or 1) - 1 - (len(line) - len(shown))) + "^"
    # Continues the column in which errors put their text.
    why = f"{shown}\n       {caret}" if shown else ""
    name = os.path.relpath(path) if not os.path.relpath(path).startswith("..") else path
    return UserError(
        f"{type(error).__name__}: {error.msg}",
        where=f"{name}:{error.lineno or 1}",
        why=why,
        hint="correct the line; no worker was started",
    )


def check_module(name: str, working_dir: str) -> None:
    """Raise UserError where `python -m NAME` would find nothing to run. Imports none of it."""
    spec = find_module(name, working_dir)
    if spec is not None and spec.submodule_search_locations is not None:
        main = find_module(f"{name}.__main__", working_dir)
        if main is None:
            raise UserError(
                f"{name!r} is a package without a __main__ module.",
                why=f"it is in {next(iter(spec.submodule_search_locations), '?')}",
                hint=f"name a module in it, as in `-m {name}.train`",
            )
        spec = main
    if spec is None:
        raise UserError(
            f"There is no module {name!r}.",
            why=f"looked in {os.path.abspath(working_dir)} and in the packages of {sys.executable}",
            hint=f"install it, or start a file with `shoal run {name}`" if name.endswith(".py") else "check the name",
        )
    if spec.origin and spec.origin.endswith(".py"):
        check_syntax(spec.origin)


def find_module(name: str, working_dir: str) -> ModuleSpec | None:
    """Find a module as `python -m` would, step by step from its outermost package, without running any of them."""
    path: list[str] | None = [os.path.abspath(working_dir), *sys.path]
    full_name, spec = "", None
    for part in name.split("."):
        if path is None or not part:
            return None
        full_name = f"{full_name}.{part}" if full_name else part
        spec = PathFinder.find_spec(full_name, path) or (_ask_others(part) if full_name == part else None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return spec


def _ask_others(name: str) -> ModuleSpec | None:
    """Editable installs and frozen modules have finders of their own."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find is not None else None
        if isinstance(spec, ModuleSpec):
            return spec
    return None
