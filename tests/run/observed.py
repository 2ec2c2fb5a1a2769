"""Python processes for the tests of `shoal.observe` to look at."""

import contextlib
import subprocess
import sys

STEP = """
def make_step(step):
    return StepMetrics(step=step, time=time.time(), epoch=0, loss=1.0 / (step + 1), num_samples=8, global_samples=16,
                       lr=0.1, compute=0.008, communicate=0.001, wait=0.0005, load=0.0005, other=0.0)
"""
HEAD = f"""
import os, sys, time
from shoal.observe import folder, journal, metrics, runs
from shoal.observe.console import Console
from shoal.observe.recorder import Recorder
from shoal.spec.event import Event, StepMetrics
{STEP}
"""


@contextlib.contextmanager
def python(code, *args, **options):
    """A Python process that runs `code`; it is dead when the block ends."""
    process = subprocess.Popen([sys.executable, "-c", HEAD + code, *map(str, args)], **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
