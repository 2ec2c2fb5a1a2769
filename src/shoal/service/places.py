"""Where a service is: its folder under SHOAL_HOME, and what it wrote there for those who ask it."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass

from shoal.cluster.files import write_private
from shoal.engine.clusters import boot_id
from shoal.engine.env import shoal_home
from shoal.spec.errors import UserError

PORT = 4647
_STATE, TOKEN, LOCK, LOG, LOGIN, JOBS = "service.json", "token", "lock", "service.log", "login.json", "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A service on this machine, as it wrote itself down."""

    address: str
    pid: int
    boot: str
    certificate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How to ask a service: where it is, with which token, and by which certificate it is known (PEM)."""

    address: str
    token: str
    certificate: str = ""


def service_folder(home: str | None = None) -> str:
    return os.path.join(home or shoal_home(), "service")


def write_up(folder: str, up: Up) -> None:
    write_private(folder, _STATE, json.dumps(asdict(up)))


def remove_up(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, _STATE))


def read_up(folder: str) -> Up | None:
    """The service that was last up here, which may have been killed since; None where there is none."""
    try:
        with open(os.path.join(folder, _STATE), encoding="utf-8") as file:
            return Up(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def is_up(up: Up | None) -> bool:
    """Whether its process lives. It holds a lock while it does; this look needs none."""
    if up is None or up.boot != boot_id():
        return False
    try:
        with open(f"/proc/{up.pid}/cmdline", "rb") as file:
            return b"shoal.service.daemon" in file.read()
    except OSError:
        return False


def is_down() -> bool:
    """Whether a service of this home was up and did not end well: it is to come back."""
    up = read_up(service_folder())
    return up is not None and not is_up(up)


def find_login() -> Login | None:
    """How to ask the service that is up here, or the one that this person has logged in to; None where there is none.

    One that was killed counts while nobody ended it: its jobs go on, and it comes back.
    """
    folder = service_folder()
    up = read_up(folder)
    if up is not None:
        return Login(address=up.address, token=_read_text(os.path.join(folder, TOKEN)), certificate=up.certificate)
    return read_login()


def read_login() -> Login | None:
    try:
        with open(os.path.join(service_folder(), LOGIN), encoding="utf-8") as file:
            return Login(**json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{os.path.join(service_folder(), LOGIN)} cannot be read.", why=str(error), hint="`shoal login` again"
        ) from None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read.", why=str(error), hint="`shoal up` makes a new one") from None
