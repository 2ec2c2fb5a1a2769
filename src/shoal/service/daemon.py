"""The process of the service: `python -m shoal.service.daemon HOME HOST PORT`. It ends well with SIGTERM."""

import contextlib
import ctypes
import fcntl
import getpass
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from shoal.cluster.files import make_folder, write_private
from shoal.engine.clusters import boot_id
from shoal.service import acts, places
from shoal.service.dispatch import Dispatcher
from shoal.service.people import ADMIN, Person, digest_token, new_token
from shoal.service.settings import read_settings
from shoal.service.state import Shared
from shoal.service.store import Store
from shoal.service.warming import Warm, WarmAttempts
from shoal.service.writer import Change, Writer
from shoal.spec.errors import ShoalError, UserError
from shoal.web.door import Door

OWNER_DAYS = 365.0
RENEW_DAYS = 30.0
_M_MMAP_THRESHOLD = -3


def main(argv: list[str]) -> int:
    home, host, port = argv[0], argv[1], int(argv[2])
    folder = places.service_folder(home)
    make_folder(folder)
    _return_memory()
    try:
        with _held(folder):
            return _serve(home, folder, host, port)
    except ShoalError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code


def _return_memory() -> None:
    """Have large blocks given back to the system when they are freed; glibc comes to keep up to 64 MiB of them."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 << 10)


@contextlib.contextmanager
def _held(folder: str) -> Iterator[None]:
    """One service a folder. The lock ends with the process, however that ends."""
    with open(os.path.join(folder, places.LOCK), "a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("A service is up already.", hint="`shoal down` ends it") from None
        yield


def _serve(home: str, folder: str, host: str, port: int) -> int:
    import uvicorn

    from shoal.service.api import Api

    class _Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Answer first: what the dispatcher needs for decisions takes as long to import as all else."""
            await super().startup(sockets)
            dispatcher.start()

    settings = read_settings(home, policies)
    store = Store(folder)
    _skip_numbers(store, home)
    woken = threading.Event()
    writer = Writer(store, woken.set)
    try:
        with _listen(folder, host, port) as listener:
            door = Door(
                host=host,
                port=listener.getsockname()[1],
                scheme="http" if _is_loopback(host) else "https",
                right_way="ask it at the address that `shoal up` printed",
            )
            certificate, named, key, chain = "", host, None, None
            if door.scheme == "https":
                # Imported here only: the shorter a start, the sooner jobs are known again.
                from shoal.cluster.reach import choose_address
                from shoal.service.transport import certificate_for, files_for

                certificate = certificate_for(folder, host)
                key, chain = files_for(folder)
                named = choose_address(None) if host in ("0.0.0.0", "::") else host
            _let_owner_in(store, writer, folder)
            shared = Shared(home=home, folder=folder, store=store, settings=settings, writer=writer, woken=woken)
            warm = Warm(lambda: shared.settings.is_warm)
            dispatcher = Dispatcher(shared, WarmAttempts(warm))
            config = uvicorn.Config(
                Api(shared, door).app(),
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=2,
                ssl_keyfile=key,
                ssl_certfile=chain,
            )
            address = f"{door.scheme}://{f'[{named}]' if ':' in named else named}:{door.port}"
            up = places.Up(address=address, pid=os.getpid(), boot=boot_id(), certificate=certificate)
            places.write_up(folder, up)
            # The server ends well with a signal, and then raises it again for whoever was there before.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            try:
                _Server(config).run(sockets=[listener])
            finally:
                dispatcher.close()
                warm.close()
    finally:
        writer.close()
        store.close()
    places.remove_up(folder)
    return 0


def policies() -> dict[str, object]:
    from shoal.place.policies import POLICIES

    return dict(POLICIES)


def _is_loopback(host: str) -> bool:
    return Door(host=host, port=0).is_loopback


def _listen(folder: str, host: str, port: int) -> socket.socket:
    """A socket at this port; 0 is where the service was before, else the usual port, else a free one."""
    before = places.read_up(folder)
    last = int(before.address.rpartition(":")[2]) if before else places.PORT
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port else (last, places.PORT, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            trouble = error
    raise UserError(
        f"Cannot listen at {host}:{port}.",
        why=trouble.strerror or str(trouble),
        hint="choose another `--port`, or a `--host` that this machine has",
    )


def _skip_numbers(store: Store, home: str) -> None:
    """Begin after runs that another service's jobs have left here: a number is the name of a run folder."""
    with contextlib.suppress(OSError):
        names = os.listdir(os.path.join(home, "runs"))
        numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"job-(\d{1,15})", name))]
        store.next_number = max([store.next_number - 1, *numbers]) + 1


def _let_owner_in(store: Store, writer: Writer, folder: str) -> None:
    """Whoever runs the service is an admin, with a token in a file that only they read, renewed before it ends."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", getpass.getuser()) or "owner"
    path, now = os.path.join(folder, places.TOKEN), store.clock.now()
    with contextlib.suppress(OSError):
        with open(path, encoding="ascii") as file:
            token = store.known.tokens.get(digest_token(file.read().strip()))
        if token and token.ends_at and not token.is_revoked and token.ends_at > now + RENEW_DAYS * acts.DAY_SECONDS:
            return
    secret, owner = new_token(), Person(name=name, role=ADMIN)

    def add(change: Change) -> None:
        if name not in store.known.people:
            acts.add_person(change, owner, owner)
        acts.give_token(change, owner, name, digest_token(secret), OWNER_DAYS)

    writer.do(add).result()
    write_private(folder, places.TOKEN, secret)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
