"""The command line. Every verb imports its part when it is called, so that `shoal --help` stays fast."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.spec.errors import ShoalError, UserError
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.observe.runs import RunInfo
    from shoal.spec.job import Job

HELP = """\
usage: shoal VERB ...

Train, tune and serve PyTorch models across the machines you have.

  shoal demo                     what shoal does, shown in a minute
  shoal run -n 4 SCRIPT [ARGS]   any script that runs under torchrun, or one that uses shoal
  shoal run -n 2:8 SCRIPT        the same with 2 to 8 workers, which may come and go
  shoal resize RUN -n 3          another number of workers, while it runs
  shoal kill RUN --rank 1        end one of them, to see what happens
  shoal stacks RUN               where its workers are now, in your code
  shoal ps                       the runs there are
  shoal logs RUN                 what its workers printed
  shoal explain RUN              where the time went, who was slow, what to change
  shoal export RUN PATH          its weights, for other tools

`shoal VERB --help` lists the options of a verb; `shoal --version` says which shoal this is.
RUN is a name or a part of one, the path of a run folder, or `last`.
"""

_RUN_OPTIONS: Sequence[tuple[tuple[str, ...], dict[str, Any]]] = (
    (
        ("-n", "--num-workers"),
        {
            "metavar": "N|MIN:MAX|auto",
            "default": None,
            "help": "how many workers (default: 1); with MIN:MAX they may come and go",
        },
    ),
    (("-m", "--module"), {"action": "store_true", "help": "SCRIPT is a module, as with `python -m`"}),
    (("--python",), {"metavar": "PATH", "help": "interpreter of the workers (default: this one)"}),
    (("--env",), {"metavar": "K=V", "action": "append", "help": "set a variable for the workers; may be repeated"}),
    (("--threads",), {"metavar": "N", "help": "threads of each worker (default: cores / workers)"}),
    (("--framework",), {"metavar": "NAME", "default": "torch", "help": "torch, or tensorflow for TF_CONFIG"}),
    (("--log-dir",), {"metavar": "DIR", "help": "the run folder (default: ~/.shoal/runs/NAME)"}),
    (("--name",), {"metavar": "NAME", "help": "name of the run (default: made of time and script)"}),
    (("--resume",), {"metavar": "RUN", "help": "go on with a run, in its folder; SCRIPT may be left out"}),
    (("-o", "--option"), {"metavar": "K=V", "action": "append", "help": "an option of shoal; may be repeated"}),
    (("--faults",), {"metavar": "FILE", "help": "what is to go wrong on purpose, as JSON: see docs/faults.md"}),
    (("--tensorboard",), {"action": "store_true", "help": "write TensorBoard files into the run folder"}),
    (("--json",), {"action": "store_true", "help": "in the end print a summary as JSON; output goes to stderr"}),
    (("--quiet",), {"action": "store_true", "help": "show nothing but errors; logs are written all the same"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Mistakes are told in a few lines, without a traceback."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        _flush(sys.stdout)
        return code
    except ShoalError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as in `shoal ps | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _flush(stream: Any) -> None:
    if stream is not None and not stream.closed:
        stream.flush()


def _dispatch(argv: list[str]) -> int:
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    if verb in ("-V", "--version"):
        sys.stdout.write(f"shoal {__version__}\n")
        return 0
    if verb not in VERBS:
        raise _unknown(verb, "verb", VERBS, "`shoal --help` lists them")
    return VERBS[verb](rest)


def _unknown(word: str, kind: str, known: Mapping[str, Any] | Sequence[str], otherwise: str) -> UserError:
    from difflib import get_close_matches

    if word.endswith(".py"):
        return UserError(f"There is no {kind} {word!r}.", hint=f"to start a script: `shoal run {word}`")
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return UserError(f"There is no {kind} {word!r}.", hint=f"did you mean `{close[0]}`?" if close else otherwise)


class _Parser(argparse.ArgumentParser):
    """Says mistakes as every other part of shoal does."""

    def __init__(self, verb: str, about: str, usage: str) -> None:
        super().__init__(
            prog=f"shoal {verb}",
            description=about,
            usage=f"shoal {verb} {usage}",
            allow_abbrev=False,
            # Looking for the width itself, argparse imports a module that takes longer than all the rest of it.
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
        )

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized") and word.startswith("-"):
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise _unknown(word.partition("=")[0], "option", flags, f"`{self.prog} --help` lists them")
        raise UserError(f"{self.prog}: {message}.", hint=f"`{self.prog} --help` says how it is used")


def run(argv: list[str]) -> int:
    """`shoal run`: start a script with several workers."""
    ours, rest = split_at_script(argv)
    options = _run_parser().parse_args(ours)
    from shoal.run import Keep, run_job

    resumed = _find_resumed(options) if options.resume is not None else None
    job = _read_job(options, rest, resumed.facts.get("job", {}) if resumed else {})
    keep = Keep(
        dir=resumed.path if resumed else options.log_dir,
        name=_check_name(options),
        is_resumed=resumed is not None,
        has_tensorboard=options.tensorboard,
        command=("shoal", "run", *argv),
    )
    outcome = run_job(job, keep=keep, out=sys.stderr if options.json else None, is_quiet=options.quiet)
    if options.json:
        import json

        sys.stdout.write(json.dumps(summary_of(outcome)) + "\n")
    return outcome.exit_code


def _run_parser() -> _Parser:
    parser = _Parser("run", "Start a script with several workers on this machine.", "[-n N] [OPTIONS] SCRIPT [ARGS]")
    for flags, settings in _RUN_OPTIONS:
        parser.add_argument(*flags, **settings)
    return parser


def split_at_script(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the script with everything that is the script's. `--` may stand between them."""
    with_value = {
        flag for flags, settings in _RUN_OPTIONS if settings.get("action") != "store_true" for flag in flags
    }
    place = 0
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "-":
        if argv[place] == "--":
            return list(argv[:place]), list(argv[place + 1 :])
        place += 2 if argv[place] in with_value else 1
    return list(argv[:place]), list(argv[place:])


def _read_job(options: argparse.Namespace, rest: list[str], recorded: Mapping[str, Any]) -> "Job":
    """The job that was asked for; `recorded` is that of the run it goes on with."""
    from shoal.spec.job import Job

    if rest:
        script, module = (None, rest[0]) if options.module else (rest[0], None)
    else:
        script, module = recorded.get("script"), recorded.get("module")
    if not script and not module:
        raise UserError("No script was named.", hint="for example: `shoal run -n 2 train.py`")
    if options.num_workers is None:
        least, most = recorded.get("min_workers"), recorded.get("num_workers", 1)
    else:
        least, most = parse_range(options.num_workers)
    if least is not None and options.framework == "tensorflow":
        raise UserError(
            "Workers cannot come and go under --framework tensorflow.",
            why="TF_CONFIG tells each of them who the others are, once",
            hint=f"use `-n {most}`",
        )
    return Job(
        script=script,
        module=module,
        args=tuple(rest[1:] if rest else recorded.get("args", ())),
        num_workers=most,
        min_workers=least,
        threads_per_worker=None if options.threads is None else _parse_count(options.threads, "--threads"),
        python=options.python,
        env={**_read_faults(options.faults), **_parse_pairs(options.env, "--env")},
        framework=_check_framework(options.framework),
        options={**recorded.get("options", {}), **_parse_pairs(options.option, "-o")},
        working_dir=_here() if rest else recorded.get("working_dir") or _here(),
    )


def _read_faults(path: str | None) -> dict[str, str]:
    """The variable that tells workers of the faults in a file, which are looked at first."""
    if path is None:
        return {}
    from shoal.testing.faults import Faults

    Faults.read(path)
    return {"SHOAL_FAULTS": f"@{os.path.abspath(path)}"}


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UserError("The folder you are in does not exist any more.", hint="`cd` into one that does") from None


def _find_resumed(options: argparse.Namespace) -> "RunInfo":
    from shoal.engine.env import shoal_home
    from shoal.observe.runs import find_run

    if options.log_dir or options.name:
        raise UserError("--resume goes on in the folder of that run.", hint="leave --log-dir and --name out")
    return find_run(shoal_home(), options.resume)


def _check_name(options: argparse.Namespace) -> str | None:
    name: str | None = options.name
    if name is not None and options.log_dir is not None:
        raise UserError(
            "Both --log-dir and --name were given.",
            why="each of them names the run folder",
            hint="leave one of them out",
        )
    if name is not None and (os.sep in name or name in ("", ".", "..") or name.startswith("-") or "\0" in name):
        raise UserError(f"{name!r} cannot be the name of a run.", hint="use letters, digits and dashes")
    return name


def _check_framework(name: str) -> str:
    if name not in ("torch", "tensorflow"):
        raise UserError(f"There is no framework {name!r}.", hint="use `torch` or `tensorflow`")
    return name


def parse_range(text: str) -> tuple[int | None, int | None]:
    """The value of `-n` as (least, most): 2:8 is (2, 8), and what may not change has no least."""
    if ":" not in text:
        return None, parse_workers(text)
    ends = text.split(":")
    if len(ends) != 2 or not all(end.strip().isdecimal() and end.isascii() for end in ends):
        raise UserError(
            f"-n {text!r} is not a range.",
            why="it has two whole numbers: how many workers at least, and at most",
            hint="for example: `-n 2:8`",
        )
    least, most = (_parse_count(end, "-n") for end in ends)
    if least > most:
        raise UserError(
            f"-n {text} asks for at least {least} workers and at most {most}.",
            why="the smaller number comes first",
            hint=f"use `-n {most}:{least}`",
        )
    return least, most


def parse_workers(text: str) -> int | None:
    """The value of `-n`: a count, or None for `auto`."""
    return None if text == "auto" else _parse_count(text, "-n", " or `auto`")


def _parse_count(text: str, flag: str, otherwise: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a number.", hint=f"give it a whole number{otherwise}") from None
    if number < 1:
        raise UserError(f"{flag} is {number}.", why="at least 1 is needed", hint=f"give it 1 or more{otherwise}")
    return number


def _parse_pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip() or "\0" in text:
            raise UserError(f"{flag} {text!r} is not of the form NAME=VALUE.", hint=f"for example: `{flag} SEED=1`")
        pairs[name] = value
    return pairs


def summary_of(outcome: Any) -> dict[str, Any]:
    """What `--json` prints about a run."""
    from dataclasses import asdict

    facts = asdict(outcome)
    failures = facts.pop("failures")
    return {**facts, "cause": failures[0] if failures else None, "num_failures": len(failures)}


def ps(argv: list[str]) -> int:
    """`shoal ps`: list runs."""
    parser = _Parser("ps", "List runs, the newest first.", "[--all] [--json]")
    parser.add_argument("-a", "--all", action="store_true", help="all of them, not only the newest")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.engine.env import shoal_home
    from shoal.observe.ps import print_runs

    return print_runs(shoal_home(), sys.stdout, as_json=options.json, show_all=options.all, width=_width())


def logs(argv: list[str]) -> int:
    """`shoal logs`: show what workers printed."""
    parser = _Parser("logs", "Show what the workers of a run printed.", "RUN [--rank N] [--follow] [--lines N]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", action="append", default=[], help="only this rank; may be repeated")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--lines", metavar="N", help="only the last lines of each rank")
    options = parser.parse_args(argv)
    from shoal.engine.env import shoal_home
    from shoal.observe.logs import print_logs

    ranks = [_parse_count(text, "--rank") if text != "0" else 0 for text in options.rank]
    lines = None if options.lines is None else _parse_count(options.lines, "--lines")
    return print_logs(shoal_home(), options.run, sys.stdout, ranks=ranks, follow=options.follow, num_lines=lines)


def explain(argv: list[str]) -> int:
    """`shoal explain`: say where the time of a run went."""
    parser = _Parser("explain", "Say where the time of a run went, and what to change.", "RUN [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.engine.env import shoal_home
    from shoal.observe.explain import print_explanation

    return print_explanation(shoal_home(), options.run, sys.stdout, as_json=options.json, width=_width())


def export(argv: list[str]) -> int:
    """`shoal export`: write a run's weights to a file that other tools read."""
    parser = _Parser(
        "export", "Write the weights of a run's newest valid checkpoint.", "RUN PATH [--format F] [--ema]"
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--format", default="safetensors", help="safetensors, state_dict (.pt) or dcp (a folder)")
    parser.add_argument("--ema", action="store_true", help="the moving average instead of the parameters")
    parser.add_argument("--json", action="store_true", help="say as JSON what was written")
    options = parser.parse_args(argv)
    formats = ("safetensors", "state_dict", "dcp")
    if options.format not in formats:
        raise _unknown(options.format, "format", formats, f"use one of: {', '.join(formats)}")
    from shoal.checkpoint.foreign import read_weights, write_weights
    from shoal.engine.env import shoal_home
    from shoal.observe.runs import find_run

    run = find_run(shoal_home(), options.run)
    weights = read_weights(run.path, "ema" if options.ema else "model")
    path = write_weights(weights, options.path, options.format)
    if options.json:
        import json

        facts = {"run": run.name, "path": str(path), "format": options.format, "num_tensors": len(weights)}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(f"{len(weights)} tensors of {run.name} written to {path}\n")
    return 0


def demo(argv: list[str]) -> int:
    """`shoal demo`: show the promise."""
    from importlib import import_module

    return int(import_module("shoal.demo").main(argv) or 0)


def resize(argv: list[str]) -> int:
    """`shoal resize`: change the number of workers of a run that goes on."""
    parser = _Parser("resize", "Change the number of workers of an elastic run.", "RUN -n N [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("-n", "--num-workers", metavar="N", required=True, help="how many workers from now on")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    wanted = _parse_count(options.num_workers, "-n")
    facts = _ask_running(options.run, {"verb": "resize", "num_workers": wanted})
    before = facts["before"]
    if wanted > before:
        then = "new workers are started and join between two steps"
    elif wanted < before:
        then = "those with the highest numbers leave after the step they are in"
    else:
        then = "it has as many"
    _print_answer(facts, options.json, f"{facts['run']}: {before} -> {wanted} workers; {then}")
    return 0


def kill(argv: list[str]) -> int:
    """`shoal kill`: send a signal to one worker of a run, for practice."""
    parser = _Parser("kill", "End or freeze one worker of a run, for practice.", "RUN --rank N [--signal S] [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", required=True, help="which worker")
    parser.add_argument("--signal", metavar="S", default="KILL", help="KILL (default), STOP, TERM or CONT")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    rank = 0 if options.rank == "0" else _parse_count(options.rank, "--rank")
    name = options.signal.upper().removeprefix("SIG")
    facts = _ask_running(options.run, {"verb": "kill", "rank": rank, "signal": name})
    _print_answer(
        facts, options.json, f"{facts['run']}: {facts['signal']} sent to rank {rank}, process {facts['pid']}"
    )
    return 0


def stacks(argv: list[str]) -> int:
    """`shoal stacks`: show what the workers of a run are doing now."""
    parser = _Parser("stacks", "Show where the workers of a run are now.", "RUN [--rank N] [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", action="append", default=[], help="only this rank; may be repeated")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    ranks = [_parse_count(text, "--rank") if text != "0" else 0 for text in options.rank]
    facts = _ask_running(options.run, {"verb": "stacks"})
    from shoal.hanging import read_stacks, tell_all

    found = read_stacks(facts["stacks"], ranks)
    _print_answer({"run": facts["run"], "stacks": [each.plain() for each in found]}, options.json, tell_all(found))
    return 0


def _ask_running(text: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the launcher of a run that goes on; returns its answer with the name of the run."""
    from shoal.engine.env import shoal_home
    from shoal.engine.requests import ask
    from shoal.observe.runs import find_run

    run = find_run(shoal_home(), text)
    if run.status != "running":
        ended = "was killed" if run.status == "lost" else f"has ended: {run.status}"
        raise UserError(
            f"Run {run.name} {ended}.", why="nobody is there to ask", hint="`shoal ps` lists those that run"
        )
    return {"run": run.name, **ask(run.path, request)}


def _print_answer(facts: dict[str, Any], as_json: bool, text: str) -> None:
    import json

    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")


def _width() -> int:
    """Columns to fill; a pipe takes lines of any length."""
    from shoal.observe.console import terminal_width

    return terminal_width(sys.stdout) if sys.stdout.isatty() else 10_000


VERBS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "run": run,
    "resize": resize,
    "kill": kill,
    "stacks": stacks,
    "ps": ps,
    "logs": logs,
    "explain": explain,
    "export": export,
}
