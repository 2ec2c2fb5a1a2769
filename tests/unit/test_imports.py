"""Imports point down only, and the launcher stays light. Where an arrow points elsewhere, all of them are drawn."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

LEVELS = (
    ("__main__",),
    ("cli",),
    ("verbs",),
    ("demo", "testing"),
    ("__init__",),
    ("task_run",),
    ("run",),
    ("task_crew",),
    ("auto", "watch"),
    ("answer",),
    ("elastic_run", "dash"),
    ("service",),
    ("hanging", "diagnosing", "sending", "alerting", "opened", "learning"),
    ("tasks",),
    ("train", "cluster"),
    ("comm", "data", "checkpoint", "elastic", "observe", "engine", "place"),
    ("files", "verb_parser", "web"),
    ("spec", "version"),
)
"""A part may import what stands on a lower line. Parts of one line never import each other.

`__init__` holds the public names, which the demo and tests of others use like anybody else.
"""

LEVEL_OF = {part: number for number, parts in enumerate(LEVELS) for part in parts}

Arrow = tuple[str, str]


def part_of(file: Path) -> str:
    """The folder under `src/shoal`, or the module that lies there."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def modules_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is named in an import, wherever it stands: on top, in a function, for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            module = node.module or ""
            # `from shoal import run` names a part; `from shoal import Trainer` a public name.
            inner = (
                [f"shoal.{name.name}" for name in node.names if name.name in LEVEL_OF] if module == "shoal" else []
            )
            yield from ((name, node.lineno) for name in inner or [module])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from ((str(arg.value), node.lineno) for arg in node.args if isinstance(arg, ast.Constant))


def read_arrows() -> dict[Arrow, list[str]]:
    """(from, to) -> the places in the source where that arrow is drawn."""
    arrows: dict[Arrow, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for module, line in modules_in(ast.parse(file.read_text())):
            package, _, rest = module.partition(".")
            if package == "shoal":
                arrow = part_of(file), rest.partition(".")[0] or "__init__"
                arrows.setdefault(arrow, []).append(f"{file.relative_to(SOURCE)}:{line}")
    return arrows


def is_wrong(arrow: Arrow) -> bool:
    start, end = arrow
    return start != end and LEVEL_OF[start] >= LEVEL_OF[end]


def draw(arrows: dict[Arrow, list[str]]) -> str:
    """Every part with what it imports, level by level; wrong arrows carry the places they come from."""
    lines = [""]
    for parts in LEVELS:
        for part in parts:
            ends = sorted(
                {end for start, end in arrows if start == part} - {part}, key=lambda end: (LEVEL_OF[end], end)
            )
            lines.append(f"  {part:12} -> {', '.join(ends) or '(nothing)'}")
            for end in ends:
                if is_wrong((part, end)):
                    lines += [f"      WRONG: {end}, in {place}" for place in arrows[part, end]]
        lines.append("  " + "─" * 40)
    return "\n".join(lines)


def test_every_part_has_its_level():
    parts = {part_of(file) for file in SOURCE.rglob("*.py")}
    assert parts == set(LEVEL_OF), "a new folder or module: say in LEVELS where it stands, and in docs/journey.md"


def test_imports_point_down_only():
    arrows = read_arrows()
    assert not [arrow for arrow in arrows if is_wrong(arrow)], draw(arrows)


def test_an_arrow_that_points_up_or_sideways_is_seen_and_drawn():
    arrows = {
        ("comm", "train"): ["comm/shm.py:7"],
        ("data", "comm"): ["data/loader.py:3"],
        ("train", "comm"): ["x:1"],
    }
    assert [is_wrong(arrow) for arrow in arrows] == [True, True, False]
    picture = draw(arrows)
    assert "WRONG: train, in comm/shm.py:7" in picture
    assert "WRONG: comm, in data/loader.py:3" in picture
    assert picture.count("WRONG") == 2


def test_only_one_module_reads_environment_variables():
    """Variables carry facts from a launcher to its worker. `worker.py` sets some; it reads none."""
    readers = set()
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        set_here = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        }
        for node in ast.walk(tree):
            is_environ = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            if is_environ and id(node) not in set_here:
                readers.add(str(file.relative_to(SOURCE)))
    assert readers == {"engine/env.py"}


LIGHT = sorted(
    str(file.relative_to(SOURCE.parent).with_suffix("")).replace("/", ".")
    for part in (
        *("__init__.py", "cli.py", "run.py", "auto.py", "watch.py", "answer.py", "elastic_run.py"),
        *(
            "task_run.py",
            "task_crew.py",
            "spec",
            "engine",
            "observe",
            "elastic",
            "tasks",
            "cluster",
            "dash",
            "service",
        ),
    )
    for file in ([SOURCE / part] if part.endswith(".py") else (SOURCE / part).glob("*.py"))
)


def test_the_launcher_imports_neither_torch_nor_numpy():
    code = (
        f"import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        f"    importlib.import_module(name.removesuffix('.__init__'))\n"
        f"    heavy = sorted({{'torch', 'numpy'}} & set(sys.modules))\n"
        f"    assert not heavy, f'{{name}} imports {{heavy}}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_faults_are_within_reach_and_need_no_torch():
    code = "import sys, shoal\nassert len(shoal.testing.Faults().kill(1, 3)) == 1\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
