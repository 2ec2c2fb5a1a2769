"""Verbs that ask something of a run that goes on."""

import sys
from typing import TYPE_CHECKING, Any

from shoal.spec.errors import UserError
from shoal.verb_parser import Parser, parse_count

if TYPE_CHECKING:
    from shoal.observe.asks import Answers
    from shoal.observe.runs import RunInfo


def resize(argv: list[str]) -> int:
    """`shoal resize`: change the number of workers of a run that goes on."""
    parser = Parser("resize", "Change the number of workers of an elastic run.", "RUN -n N [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("-n", "--num-workers", metavar="N", required=True, help="how many workers from now on")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    wanted = parse_count(options.num_workers, "-n")
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
    parser = Parser("kill", "End or freeze one worker of a run, for practice.", "RUN --rank N [--signal S] [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", required=True, help="which worker")
    parser.add_argument("--signal", metavar="S", default="KILL", help="KILL (default), STOP, TERM or CONT")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    rank = 0 if options.rank == "0" else parse_count(options.rank, "--rank")
    name = options.signal.upper().removeprefix("SIG")
    facts = _ask_running(options.run, {"verb": "kill", "rank": rank, "signal": name})
    _print_answer(
        facts, options.json, f"{facts['run']}: {facts['signal']} sent to rank {rank}, process {facts['pid']}"
    )
    return 0


def stacks(argv: list[str]) -> int:
    """`shoal stacks`: show what the workers of a run are doing now."""
    parser = Parser("stacks", "Show where the workers of a run are now.", "RUN [--rank N] [--native] [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", action="append", default=[], help="only this rank; may be repeated")
    parser.add_argument("--native", action="store_true", help="with the frames of C and C++, by py-spy")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    ranks = [parse_count(text, "--rank") if text != "0" else 0 for text in options.rank]
    from shoal.hanging import add_native, read_stacks, tell_all

    run = _find_running(options.run)
    facts = _ask_running(run.path, {"verb": "stacks"})
    found = read_stacks(facts["stacks"], ranks)
    native = add_native(run, found, is_wanted=options.native)
    plain = [{**each.plain(), **({"native": native[each.rank]} if each.rank in native else {})} for each in found]
    _print_answer({"run": facts["run"], "stacks": plain}, options.json, tell_all(found, native))
    return 0


def profile(argv: list[str]) -> int:
    """`shoal profile`: have `torch.profiler` look at one rank of a run for some steps."""
    parser = Parser(
        "profile", "Profile some steps of one rank, while it trains.", "RUN [--rank N] [--steps N] [--json]"
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", default="0", help="which worker (default: 0)")
    parser.add_argument("--steps", metavar="N", default="10", help="how many steps (default: 10)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    rank = 0 if options.rank == "0" else parse_count(options.rank, "--rank")
    run, answers = have_recorded(options.run, "profile", rank, parse_count(options.steps, "--steps"))
    from shoal.observe.asks import read_table, tell_profile

    if rank in answers.lost:
        raise UserError(
            f"Rank {rank} was not profiled.",
            why=answers.lost[rank],
            hint="`shoal explain RUN` says what became of it; where it was replaced, ask again",
        )
    facts = answers.recorded[rank]
    if "problem" in facts:
        hint = "end any profiler that the script starts itself"
        raise UserError(f"Rank {rank} could not be profiled.", why=str(facts["problem"]), hint=hint)
    table = read_table(facts)
    told = {"run": run, "rank": rank, **facts, "operators": table.get("operators", [])}
    _print_answer(told, options.json, tell_profile(facts, table))
    return 0


def have_recorded(text: str, what: str, rank: int | None, num_steps: int) -> "tuple[str, Answers]":
    """Ask a run to record more of its next steps, and wait until that is done."""
    from shoal.engine.requests import ask
    from shoal.observe.asks import Answers, check_records

    run = _find_running(text)
    check_records(run.path, rank)
    answers = Answers(run.path)
    asked = ask(run.path, {"verb": "record", "what": what, "rank": rank, "num_steps": num_steps})
    answers.follow(asked["id"], asked["ranks"], sys.stderr)
    return run.name, answers


def _ask_running(text: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the launcher of a run that goes on; returns its answer with the name of the run."""
    from shoal.engine.env import shoal_home
    from shoal.hanging import ask_running
    from shoal.observe.runs import find_run

    return ask_running(find_run(shoal_home(), text), request)


def _find_running(text: str) -> "RunInfo":
    from shoal.engine.env import shoal_home
    from shoal.hanging import check_running
    from shoal.observe.runs import find_run

    run = find_run(shoal_home(), text)
    check_running(run)
    return run


def _print_answer(facts: dict[str, Any], as_json: bool, text: str) -> None:
    import json

    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")
