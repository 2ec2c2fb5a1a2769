"""Verbs that show runs, those that go on and those that are over."""

import sys

from shoal.spec.errors import UserError
from shoal.verb_parser import Parser, add_address, parse_count, unknown
from shoal.verbs.asking import have_recorded


def ps(argv: list[str]) -> int:
    """`shoal ps`: list runs."""
    parser = Parser("ps", "List runs, the newest first.", "[--all] [--cluster] [--json]")
    parser.add_argument("--cluster", action="store_true", help="those that were submitted to a cluster")
    add_address(parser)
    parser.add_argument("-a", "--all", action="store_true", help="all of them, not only the newest")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.cluster or options.address is not None:
        from shoal.cluster.submitted import print_submitted

        return print_submitted(options.address, sys.stdout, as_json=options.json, width=_width())
    from shoal.engine.env import shoal_home
    from shoal.observe.ps import print_runs

    return print_runs(shoal_home(), sys.stdout, as_json=options.json, show_all=options.all, width=_width())


def logs(argv: list[str]) -> int:
    """`shoal logs`: show what workers printed."""
    parser = Parser("logs", "Show what the workers of a run printed.", "RUN [--rank N] [--follow] [--lines N]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", metavar="N", action="append", default=[], help="only this rank; may be repeated")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--lines", metavar="N", help="only the last lines of each rank")
    parser.add_argument("--cluster", action="store_true", help="of a run that was submitted to a cluster")
    add_address(parser)
    options = parser.parse_args(argv)
    if options.cluster or options.address is not None:
        if options.rank or options.lines is not None:
            raise UserError(
                "--rank and --lines are for runs whose folder is on this machine.",
                hint=f"leave them out, or run `shoal logs {options.run}` on the head of the cluster",
            )
        from shoal.cluster import submitted

        return submitted.show(options.run, options.address, until_end=options.follow)
    from shoal.engine.env import shoal_home
    from shoal.observe.logs import print_logs

    ranks = [parse_count(text, "--rank") if text != "0" else 0 for text in options.rank]
    lines = None if options.lines is None else parse_count(options.lines, "--lines")
    return print_logs(shoal_home(), options.run, sys.stdout, ranks=ranks, follow=options.follow, num_lines=lines)


def explain(argv: list[str]) -> int:
    """`shoal explain`: say where the time of a run went."""
    parser = Parser("explain", "Say where the time of a run went, and what to change.", "RUN [--json] [--html FILE]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", metavar="FILE", help="write it to a file that any browser shows, without a network")
    options = parser.parse_args(argv)
    from shoal.engine.env import shoal_home
    from shoal.observe.explain import print_explanation

    return print_explanation(
        shoal_home(), options.run, sys.stdout, as_json=options.json, width=_width(), html_path=options.html
    )


def top(argv: list[str]) -> int:
    """`shoal top`: the runs there are, live."""
    parser = Parser(
        "top", "Watch runs live, their workers and machines.", "[RUN] [--every SECONDS] [--once] [--json]"
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="begin with the ranks of this one")
    parser.add_argument("--every", metavar="SECONDS", default="1", help="how often to look (default: 1)")
    parser.add_argument("--once", action="store_true", help="print it once, and end")
    parser.add_argument("--json", action="store_true", help="once, as JSON")
    options = parser.parse_args(argv)
    every = _parse_seconds(options.every, "--every")
    from shoal.engine.env import shoal_home, terminal
    from shoal.observe import top_screen
    from shoal.observe.runs import find_run
    from shoal.observe.top import Reader

    home, (term, has_color) = shoal_home(), terminal()
    run = find_run(home, options.run) if options.run is not None else None
    name, reader = run.name if run is not None else "", Reader(home, run.path if run is not None else None)
    if options.once or options.json or not sys.stdout.isatty():
        top_screen.print_once(reader, sys.stdout, width=_width(), as_json=options.json, name=name)
        return 0
    if not top_screen.can_draw(sys.stdout, term):
        return top_screen.print_again_and_again(reader, sys.stdout, width=_width(), name=name)
    return top_screen.show(reader, name, every, has_color=has_color)


def _parse_seconds(text: str, flag: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a number.", hint="give it seconds, such as 0.5") from None
    if not 0.1 <= seconds <= 3600:
        raise UserError(
            f"{flag} is {text}.", why="it may be 0.1 to 3600 seconds", hint="give it seconds, such as 0.5"
        )
    return seconds


def trace(argv: list[str]) -> int:
    """`shoal trace`: write what is known of a run as a file for Perfetto."""
    usage = "RUN [-o FILE] [--steps A:B] [--record N [--rank R]] [--json]"
    parser = Parser("trace", "Write a run as a trace for Perfetto or chrome://tracing.", usage)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("-o", "--output", metavar="FILE", help="(default: trace.json.gz in the run folder)")
    parser.add_argument("--steps", metavar="A:B", help="only these steps, from A to before B")
    parser.add_argument("--record", metavar="N", help="first have the run record what happens inside of N steps")
    parser.add_argument("--rank", metavar="R", help="with --record: only this rank (default: all)")
    parser.add_argument("--json", action="store_true", help="say as JSON what was written")
    options = parser.parse_args(argv)
    from shoal.engine.env import shoal_home
    from shoal.observe.runs import find_run
    from shoal.observe.trace_file import parse_steps, print_trace

    parse_steps(options.steps)
    if options.rank is not None and options.record is None:
        raise UserError("--rank says who is to record.", hint="add `--record 20`, or leave out --rank")
    run, steps = find_run(shoal_home(), options.run), options.steps
    if options.record is not None:
        rank = None if options.rank is None else 0 if options.rank == "0" else parse_count(options.rank, "--rank")
        _, answers = have_recorded(options.run, "spans", rank, parse_count(options.record, "--record"))
        steps = steps or answers.recorded_steps()
    return print_trace(run, options.output, steps, sys.stdout, as_json=options.json)


def export(argv: list[str]) -> int:
    """`shoal export`: write a run's weights to a file that other tools read."""
    parser = Parser(
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
        raise unknown(options.format, "format", formats, f"use one of: {', '.join(formats)}")
    from shoal.checkpoint.foreign import read_weights, write_weights
    from shoal.engine.env import shoal_home
    from shoal.files import is_url, mask
    from shoal.observe.runs import find_run

    if is_url(options.run):
        name, place = mask(options.run), options.run
    else:
        run = find_run(shoal_home(), options.run)
        name, place = run.name, run.path
    weights = read_weights(place, "ema" if options.ema else "model")
    path = write_weights(weights, options.path, options.format)
    if options.json:
        import json

        facts = {"run": name, "path": str(path), "format": options.format, "num_tensors": len(weights)}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(f"{len(weights)} tensors of {name} written to {path}\n")
    return 0


def _width() -> int:
    """Columns to fill; a pipe takes lines of any length."""
    from shoal.observe.console import terminal_width

    return terminal_width(sys.stdout) if sys.stdout.isatty() else 10_000
