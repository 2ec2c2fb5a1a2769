"""A rank of a job that somebody else started: `mpirun -n 4 shoal worker train.py`, or with `srun` of Slurm.

What that launcher says about this process becomes what torchrun would say. Then the script runs in this process, as
`python SCRIPT` would run it.
"""

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.engine import worker
from shoal.engine.entry import entry_of
from shoal.engine.env import inherited_env, rank_variables
from shoal.engine.machine import available_cores
from shoal.engine.meeting_point import MeetingPoint, find_by_mpi, find_without_mpi
from shoal.engine.place import Place, find_place
from shoal.spec.errors import MemberLost, ShoalError, UserError
from shoal.spec.job import Job, Seat

USAGE = """\
usage: shoal worker [-m] SCRIPT [ARGS]

Run a script as one rank of a job that mpirun, srun or torchrun has started; on its own, as a run of one.

  -m    SCRIPT is a module, as with `python -m`

  mpirun -n 4 shoal worker train.py
  srun -n 4 shoal worker train.py
"""

_PATIENCE_SECONDS = 10.0
"""How long a rank keeps to itself what another is likely to tell better, and what the end of a rank may take."""

End = Callable[[int], object]


def main(argv: Sequence[str]) -> int:
    """`shoal worker`: returns 0 when the script ends well; else the process, or the whole job, ends in here."""
    if list(argv[:1]) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    env = inherited_env()
    place = find_place(env)
    try:
        entry = read_entry(argv)
        mpi = import_mpi(place, env) if place.launcher == "mpi" else None
        if place.launcher != "torchrun":
            place = take_place(mpi, place, env)
    except UserError as error:
        return tell_once_a_node(error, place)
    return run(entry, place, worker.leave if mpi is None else lambda code: end_job(mpi, code))


def take_place(mpi: Any | None, place: Place, env: Mapping[str, str]) -> Place:
    """Find the others, and say in this process's environment who it is. Returns what is now known of the place."""
    place, point = find_by_mpi(mpi, place, env) if mpi is not None else (place, find_without_mpi(place, env))
    for name, value in {**defaults_of(place, point), **env, **facts_of(place, point)}.items():
        os.environ[name] = value
    return place


def read_entry(argv: Sequence[str]) -> tuple[str, ...]:
    """What is to run, as `worker.py` names it; raises UserError where it cannot work."""
    is_module = list(argv[:1]) in (["-m"], ["--module"])
    named = list(argv[1:] if is_module else argv)
    if not named or named[0].startswith("-"):
        raise UserError(
            f"There is no option {named[0]!r}." if named else "No script was named.",
            hint="for example: `mpirun -n 4 shoal worker train.py`",
        )
    name, args = named[0], tuple(named[1:])
    entry = entry_of(Job(module=name, args=args) if is_module else Job(script=name, args=args))
    if entry[0] == "program":
        raise UserError(
            f"{name!r} is not a Python script.",
            why="it runs inside of this Python, which says to it who it is",
            hint=f"a program of another kind is started by mpirun or srun itself: `mpirun -n 4 {name}`",
        )
    return entry


def tell_once_a_node(error: UserError, place: Place) -> int:
    """All ranks find the same mistake. The first of a node tells it; who ended sooner would end that one, too."""
    if place.local_rank == 0:
        print(error.render(), file=sys.stderr, flush=True)
    elif place.launcher == "mpi":
        time.sleep(_PATIENCE_SECONDS)
    return error.exit_code


def import_mpi(place: Place, env: Mapping[str, str]) -> Any | None:
    """mpi4py's MPI, initialised. None where it is not installed, and not needed to find each other."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        if "MASTER_ADDR" in env and "MASTER_PORT" in env:
            return None
        raise UserError(
            "mpi4py is not installed, or does not find the MPI library.",
            why=f"ranks that mpirun has started find each other by it ({error})",
            hint="Run `pip install 'shoal[mpi]'`, or set MASTER_ADDR and MASTER_PORT for all ranks (`mpirun -x`).",
            rank=place.rank,
        ) from None
    if MPI.COMM_WORLD.Get_size() != place.size:
        raise UserError(
            f"mpirun has started {place.size} ranks, and mpi4py sees {MPI.COMM_WORLD.Get_size()}.",
            why=f"mpi4py uses another MPI than that of mpirun: {MPI.Get_library_version().splitlines()[0]}",
            hint="start it with the mpirun of that MPI, or set MPI4PY_MPIABI to mpich or openmpi: that of yours",
            rank=place.rank,
        )
    return MPI


def facts_of(place: Place, point: MeetingPoint) -> dict[str, str]:
    """Who this process is, in the variables that no launcher before this one knows better."""
    seat = Seat(
        address=point.own_address,
        local_rank=place.local_rank,
        num_local=place.local_size,
        node_rank=place.node,
        num_nodes=place.num_nodes,
    )
    return rank_variables(place.rank, place.size, seat, point.address, point.port)


def defaults_of(place: Place, point: MeetingPoint) -> dict[str, str]:
    """What holds unless the user has said otherwise: threads, and the network device that leads to the others."""
    num_sharing = 1 if place.is_bound else place.local_size
    defaults = {"OMP_NUM_THREADS": str(place.num_cores or max(1, available_cores() // num_sharing))}
    if point.interface:
        defaults |= {"GLOO_SOCKET_IFNAME": point.interface, "TP_SOCKET_IFNAME": point.interface}
    return defaults


def run(entry: Sequence[str], place: Place, end: End) -> int:
    """Run the program. One that fails says so here, and calls `end` with its exit code."""
    kind, target, *args = entry
    pid = os.getpid()
    faulthandler.enable()
    worker.prepare_for_torch()
    atexit.register(worker.let_gloo_finish, pid)
    for stream in (sys.stdout, sys.stderr):
        # Launchers pass on what they are given: whole lines, so that those of several ranks do not mix.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        worker.RUN[kind](target, args)
        return 0
    except BaseException as error:
        if os.getpid() != pid:  # a child that the program forked ends as it would without us
            raise
        error.__traceback__ = worker.users_part(error.__traceback__ and error.__traceback__.tb_next)
        code = tell_exit(error) if isinstance(error, SystemExit) else tell(error, place)
    if code:
        end(code)
    return code


def tell_exit(error: SystemExit) -> int:
    """The exit code of a program that ended itself; what is not a number is told, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def tell(error: BaseException, place: Place) -> int:
    """Show what ended the program; returns the exit code.

    What all ranks are told alike, and the loss of another, are left to the rank whose error it is, if that is heard
    of soon: under mpirun it ends this one.
    """
    if place.launcher == "mpi" and (isinstance(error, MemberLost) or (isinstance(error, UserError) and place.rank)):
        time.sleep(_PATIENCE_SECONDS)
    sys.stdout.flush()
    if isinstance(error, ShoalError):
        error.at(rank=place.rank, where=worker.place_of(error))
    if isinstance(error, ShoalError) and sys.excepthook is sys.__excepthook__:
        print(error.render(), file=sys.stderr, flush=True)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, ShoalError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def end_job(mpi: Any, code: int) -> None:
    """End all ranks of the job, which would wait for this one. What Python does at its end is done, but not for long.

    Leaving without a word would not do: MPI waits for all ranks at the end of each.
    """
    if mpi.Is_finalized():  # by the program: nobody waits any more, and nothing of MPI may be called
        worker.leave(code)
    overdue = threading.Timer(_PATIENCE_SECONDS, mpi.COMM_WORLD.Abort, [code])
    overdue.daemon = True
    overdue.start()
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        mpi.COMM_WORLD.Abort(code)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ShoalError as error:
        sys.exit(error.render())
