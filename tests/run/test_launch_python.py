"""A worker behaves as `python SCRIPT` does."""

import sys

import pytest
from launching import Box, box

__all__ = ["box"]

FACTS = """
    import json, os, sys
    print(json.dumps([
        sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name, __package__,
        sys.modules["__main__"].__dict__ is globals(), sorted(k for k in globals() if k.startswith("__")),
        os.getcwd(), str(__builtins__), type(__loader__).__name__, sys.flags.safe_path,
    ]))
"""


def outputs(box: Box, *args: str) -> tuple[str, str]:
    plain = box.execute(sys.executable, *args)
    ours = box.run("run", *args)
    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    return plain.stdout, ours.stdout


@pytest.mark.parametrize("path", ["show.py", "./show.py", "sub/show.py", "link.py"])
def test_a_script_sees_what_it_would_see_without_us(box: Box, path: str) -> None:
    box.write("show.py", FACTS)
    box.write("sub/show.py", FACTS)
    (box.folder / "link.py").symlink_to(box.folder / "sub" / "show.py")
    plain, ours = outputs(box, path, "--lr", "1", "-n", "7", "--", "--json")
    assert ours == plain


def test_a_module_sees_what_it_would_see_without_us(box: Box) -> None:
    box.write("pack/__init__.py", "")
    box.write("pack/show.py", FACTS + "    from . import other\n")
    box.write("pack/other.py", "")
    box.write("pack/__main__.py", FACTS)
    for name in ("pack.show", "pack"):
        plain, ours = outputs(box, "-m", name, "-x", "1")
        assert ours == plain


def test_safe_path_is_kept(box: Box) -> None:
    box.write("show.py", FACTS)
    box.env["PYTHONSAFEPATH"] = "1"
    plain, ours = outputs(box, "show.py")
    assert ours == plain


def test_a_file_called_like_ours_does_no_harm(box: Box) -> None:
    box.write("shoal.py", "raise SystemExit('the wrong shoal')")
    box.write("env.py", "VALUE = 1")
    box.write("show.py", "import env; print(env.VALUE)")
    # The launcher itself is the installed command, which does not look into the working folder.
    done = box.execute(sys.executable, "-P", "-m", "shoal", "run", "show.py")
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_processes_spawned_by_a_script_find_it(box: Box) -> None:
    source = """
        import multiprocessing as mp

        def square(x):
            return x * x

        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool:
                print(pool.map(square, [1, 2, 3]))
    """
    box.write("pool.py", source)
    done = box.run("run", "pool.py")
    assert (done.stdout, done.returncode) == ("[1, 4, 9]\n", 0)
    done = box.run("run", "-m", "pool")
    assert (done.stdout, done.returncode) == ("[1, 4, 9]\n", 0)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('no data')", 1),
        ("raise ValueError('bad')", 1),
        ("raise KeyboardInterrupt", 130),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_exit_codes(box: Box, source: str, code: int) -> None:
    box.write("end.py", source)
    done = box.run("run", "end.py")
    assert done.returncode == code
    assert bool(done.stderr) == bool(code)
    if "sys.exit('" in source:
        assert "no data" in done.stdout
        assert "error: The script ended itself: no data\n   at: rank 0, end.py:1\n" in done.stderr


def test_a_traceback_is_the_one_python_shows(box: Box) -> None:
    source = """
        import json

        def load():
            try:
                json.loads("{")
            except ValueError as error:
                raise RuntimeError("broken file") from error

        load()
    """
    box.write("fail.py", source)
    plain = box.execute(sys.executable, "fail.py")
    ours = box.run("run", "fail.py")
    assert ours.stdout == plain.stderr
    assert ours.stderr.splitlines()[:2] == ["error: RuntimeError: broken file", "   at: rank 0, fail.py:8"]


def test_an_error_of_shoal_is_told_and_not_traced(box: Box) -> None:
    source = """
        import shoal
        raise shoal.UserError("The loss is nan.", why="the rate is 1e9", hint="lower it", step=12)
    """
    box.write("fail.py", source)
    done = box.run("run", "fail.py")
    told = "error: The loss is nan.\n   at: rank 0, step 12, fail.py:3\n  why: the rate is 1e9\n   do: lower it\n"
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert done.stdout == "", "once is enough"
    assert box.log(0) == told
    (error,) = [event for event in box.events() if event["kind"] == "error"]
    assert "Traceback" in error["data"]["traceback"]


def test_a_hook_of_the_user_is_called(box: Box) -> None:
    box.write("hook.py", "import sys; sys.excepthook = lambda *a: print('mine', a[1]); raise ValueError('x')")
    done = box.run("run", "hook.py")
    assert (done.stdout, done.returncode) == ("mine x\n", 1)


def test_exit_functions_run_and_output_is_flushed_after_a_failure(box: Box) -> None:
    source = """
        import atexit, sys, threading, time
        atexit.register(lambda: print("bye"))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        sys.stdout = open(1, "w", buffering=100000, closefd=False)
        raise ValueError("x")
    """
    box.write("end.py", source)
    done = box.run("run", "end.py", "--env", "PYTHONUNBUFFERED=")
    assert done.stdout.splitlines()[-2:] == ["thread", "bye"]


def test_a_forked_child_that_fails_is_not_the_worker(box: Box) -> None:
    source = """
        import os
        if os.fork() == 0:
            raise ValueError("child")
        os.wait()
        print("parent", flush=True)
    """
    box.write("forks.py", source)
    done = box.run("run", "forks.py")
    assert done.returncode == 0
    assert done.stdout.endswith("parent\n")
    assert not [event for event in box.events() if event["kind"] == "error"]


def test_an_error_whose_text_fails_is_reported_all_the_same(box: Box) -> None:
    source = """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        raise Odd
    """
    box.write("odd.py", source)
    done = box.run("run", "odd.py")
    assert done.returncode == 1
    assert "error: Odd: <no text: RuntimeError>\n   at: rank 0, odd.py:5" in done.stderr


def test_a_shell_script_is_executed(box: Box) -> None:
    path = box.write("train.sh", '#!/bin/sh\necho "$RANK of $WORLD_SIZE: $1 [$SHOAL_CONTROL_FD]"; exit $2\n')
    path.chmod(0o755)
    done = box.run("run", "-n", "2", "train.sh", "a b", "4")
    assert done.returncode == 4
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2: a b []", "[1] 1 of 2: a b []"]
    path.write_text("#!/no/such/interpreter\n")
    done = box.run("run", "train.sh")
    assert done.returncode == 1
    assert "cannot execute" in done.stderr


def test_an_archive_is_run(box: Box) -> None:
    box.write("src/__main__.py", "import sys; print('in archive', sys.argv[1:])")
    box.execute(sys.executable, "-m", "zipapp", "src", "-o", "app.pyz")
    assert box.run("run", "app.pyz", "x").stdout == "in archive ['x']\n"


def test_input_goes_to_rank_0(box: Box) -> None:
    box.write("read.py", "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = box.run("run", "-n", "2", "read.py", input="hello")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 'hello'", "[1] 1 ''"]


def test_another_interpreter_that_has_no_shoal(box: Box) -> None:
    box.write("show.py", "import sys; print(sys.flags.no_site, sys.prefix); import difflib")
    wrapper = box.write("python", f'#!/bin/sh\n{sys.base_prefix}/bin/python3 -S "$@"\n')
    wrapper.chmod(0o755)
    done = box.run("run", "--python", "./python", "show.py")
    assert (done.stdout, done.returncode) == (f"1 {sys.base_prefix}\n", 0)
    done = box.run("run", "--python", "./python", "-m", "torch")
    assert done.returncode == 1
    assert "error: ModuleNotFoundError: No module named 'torch'" in done.stderr
