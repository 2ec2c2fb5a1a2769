"""The command line. Every verb is imported when it is called, so that `shoal --help` stays fast."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from shoal.spec.errors import ShoalError
from shoal.verb_parser import unknown
from shoal.version import __version__

HELP = """\
usage: shoal VERB ...

Train, tune and serve PyTorch models across the machines you have.

  shoal demo                     what shoal does, shown in a minute
  shoal run -n 4 SCRIPT [ARGS]   any script that runs under torchrun, or one that uses shoal
  shoal run -n 2:8 SCRIPT        the same with 2 to 8 workers, which may come and go
  shoal resize RUN -n 3          another number of workers, while it runs
  shoal kill RUN --rank 1        end one of them, to see what happens
  shoal stacks RUN               where its workers are now, in your code
  shoal profile RUN --rank 1     where its time goes, operator by operator
  shoal ps                       the runs there are
  shoal top                      the same live, with their workers
  shoal logs RUN                 what its workers printed
  shoal explain RUN              where the time went, who was slow, what to change
  shoal trace RUN                every step of every rank, for Perfetto
  shoal export RUN PATH          its weights, for other tools
  shoal alerts RUN               what was wrong in it, and when
  shoal send RUN --to csv        its numbers, for other tools: TensorBoard, W&B, MLflow, ...
  shoal import tensorboard DIR   runs of before, beside these
  shoal dash                     all of this on a page in the browser, live
  shoal simulate TRACE           what a scheduling policy would make of a trace of jobs

  shoal up                       start the service: a queue of jobs on this machine, for a team
  shoal submit -n 2:6 SCRIPT     put a job into it, also from a file: it goes on when you are gone
  shoal queue                    what runs and what waits: why, where in line, and how long
  shoal cancel JOB               end it; also `shoal hold JOB`, `shoal release JOB`, `shoal requeue JOB`
  shoal resize JOB -n 1:4        other bounds for its workers
  shoal nodes                    the machines, and what is free on them
  shoal drain NODE               start nothing new on it
  shoal share                    who used how much
  shoal people add NAME          let somebody in; they say `shoal login ADDRESS`
  shoal audit                    who did what; `shoal audit verify` shows that nobody changed it
  shoal down                     end the service; its jobs go on

  shoal run --engine ray ...     the same on several machines; also mpi and spark
  shoal up --cluster             begin a cluster of the machines you have, with Ray underneath
  shoal join HOST                add this machine to it
  shoal leave                    take this machine out of it
  shoal down --cluster           end it
  shoal submit --cluster SCRIPT  hand a run to it, without a service
  shoal ps --cluster             what was submitted so; `shoal logs RUN --cluster` shows what it prints
  shoal worker SCRIPT            one rank of a job that mpirun or srun has started

`shoal VERB --help` lists the options of a verb; `shoal --version` says which shoal this is.
RUN is a name or a part of one, the path of a run folder, or `last`. JOB is a number: 17, or 17-26 for ten of them.
"""

VERBS = {
    "demo": "demo:main",
    "run": "verbs.launching:run",
    "submit": "verbs.submitting:submit",
    **{verb: f"verbs.queueing:{verb}" for verb in ("queue", "cancel", "hold", "release", "requeue", "resize")},
    **{verb: f"verbs.sharing:{verb}" for verb in ("nodes", "drain", "share", "audit")},
    **{verb: f"verbs.people:{verb}" for verb in ("people", "login")},
    **{verb: f"verbs.asking:{verb}" for verb in ("kill", "stacks", "profile")},
    **{verb: f"verbs.looking:{verb}" for verb in ("ps", "top", "logs", "explain", "trace", "export")},
    "send": "verbs.send:main",
    "import": "verbs.imports:main",
    "alerts": "verbs.alerts:main",
    "dash": "dash.verb:main",
    "simulate": "verbs.simulate:main",
    "worker": "engine.joined:main",
    **{verb: f"verbs.serving:{verb}" for verb in ("up", "down")},
    **{verb: f"cluster.verbs:{verb}" for verb in ("join", "leave")},
}
"""Which function of which module under `shoal` does it."""


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
        raise unknown(verb, "verb", VERBS, "`shoal --help` lists them")
    module, _, function = VERBS[verb].partition(":")
    return int(getattr(import_module(f"shoal.{module}"), function)(rest) or 0)
