"""The suite of groups over MPI. One mpirun starts the ranks of a class, which then do what each test asks."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from shoal.testing import group_contract, ranks
from shoal.testing.group_contract import GroupContract
from shoal.testing.rigs.machine import LACKS

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
MISSING = [
    name
    for name, is_there in (("mpirun", shutil.which("mpirun")), ("mpi4py", importlib.util.find_spec("mpi4py")))
    if not is_there
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{LACKS} {', '.join(MISSING)}")


class MpiRanks(ranks.Ranks):
    """Ranks that mpirun starts: they call back over a unix socket."""

    def __init__(self, size: int, folder: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        socket = str(folder / "ranks")
        command = [*MPIRUN, "-n", str(size), sys.executable, str(Path(__file__).with_name("mpi_rank.py"))]
        self.log = folder / "mpirun.log"
        with Listener(socket, "AF_UNIX", backlog=size) as listener, self.log.open("w") as log:
            self.mpirun = subprocess.Popen([*command, socket, str(self._store.port)], stdout=log, stderr=log)
            found = dict(sorted(self._meet(listener) for _ in range(size)))
        self._pipes = [pipe for pipe, _ in found.values()]
        self.processes = [psutil.Process(pid) for _, pid in found.values()]

    def _meet(self, listener: Listener) -> tuple[int, tuple[Connection, int]]:
        listener._listener._socket.settimeout(90)  # type: ignore[attr-defined]
        try:
            pipe = listener.accept()
        except OSError:
            self.mpirun.kill()
            raise AssertionError(f"the ranks did not come: {self.log.read_text()}") from None
        rank, pid = pipe.recv()
        return rank, (pipe, pid)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            pipe.close()
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        try:
            self.mpirun.wait(10)
        except subprocess.TimeoutExpired:
            self.mpirun.terminate()
            self.mpirun.wait(20)


@contextlib.contextmanager
def mpi_ranks(size: int, folder: Path) -> Iterator[MpiRanks]:
    group = MpiRanks(size, folder)
    try:
        group.run(ranks._hello)
        yield group
    finally:
        group.close()


class MpiContract(GroupContract):
    transport = "mpi"

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Ranks]:
        with mpi_ranks(cls.size, tmp_path_factory.mktemp("mpi")) as found:
            yield found

    @pytest.fixture(autouse=True)
    def _started_by_mpirun(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def ranks_of(size: int, transport: str, devices: Sequence[str]) -> Any:
            return mpi_ranks(size, tmp_path)

        monkeypatch.setattr(group_contract, "ranks_of", ranks_of)

    @pytest.mark.parametrize("victim", ["first", "last"])
    def test_a_killed_rank_is_noticed_by_all(self, victim: str) -> None:
        pytest.skip("MPI cannot go on after the loss of a rank: mpirun ends all of them")


class TestMpiOfTwo(MpiContract):
    size = 2


@pytest.mark.slow
class TestMpiOfThree(MpiContract):
    size = 3


def test_the_loss_of_a_rank_ends_the_others_and_says_so(tmp_path: Path) -> None:
    with mpi_ranks(2, tmp_path) as found:
        found.start(group_contract.reduce_forever, numel=1000)
        found.kill(1)
        assert found.mpirun.wait(60) != 0
        assert not psutil.wait_procs(found.processes, 20)[1]
    assert "rank 1" in found.log.read_text()
