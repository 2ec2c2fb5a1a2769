"""Files by URL: where a URL leads, and in words what goes wrong there. fsspec does the work; it is an extra.

A URL is used as it is written (`s3://bucket/run`), and shown without what might be a secret. Credentials come from
where each store's own tools look for them: the environment and configuration files.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from shoal.spec.errors import UserError

T = TypeVar("T")

ANSWER_SECONDS = 10.0
"""How long a store may take to answer for the first time."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_REQUEST = re.compile(r"(https?://[^/\s'\"]+)/[^\s'\"]*")
_QUERY = re.compile(r"\?[^\s'\"]+")
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"})
_EXTRAS = {"s3": "s3", "s3a": "s3", "webhdfs": "files", "hdfs": "features"}


class StoreFailed(UserError, OSError):
    """A store did not do what it was asked to: it cannot be reached, does not know us, or has no such bucket."""


@dataclass(frozen=True, slots=True)
class Url:
    """A place in a store that is used like a `Path`: `url / "name"`, `url.name`, `url.parent`.

    `path` is what fsspec calls it; as text it is the URL, without secrets.
    """

    shown: str
    path: str = field(repr=False)
    fs: Any = field(repr=False, compare=False)

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.shown}/{name}", f"{self.path}/{name}", self.fs)

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        return self.shown.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.shown.rpartition("/")[0], self.path.rpartition("/")[0], self.fs)

    @property
    def is_object_store(self) -> bool:
        """Whether an object appears whole, and durable, with the answer to its PUT. File systems have renames."""
        return self.shown.partition("://")[0].lower() in _OBJECT_STORES


Place = Path | Url


def is_url(text: object) -> bool:
    return isinstance(text, str) and _URL.match(text) is not None


def mask(text: str) -> str:
    """A text with URLs as people may see it: without user names and passwords, and without what follows a `?`."""
    return _QUERY.sub("?***", _USERINFO.sub("***@", text)) if "://" in text else text


def locate(where: "str | Path | Url") -> Place:
    """Where a path or URL leads. Asks nobody yet; UserError where a package is missing or the scheme is unknown."""
    if not isinstance(where, str) or not is_url(where):
        return Path(where) if isinstance(where, str) else where
    scheme = where.partition("://")[0].lower()
    if scheme in ("file", "local"):
        return Path(unquote(where.partition("://")[2]))
    try:
        connect = import_module("fsspec.core").url_to_fs
    except ImportError:
        raise _missing(where, "fsspec is missing", "files") from None
    try:
        fs, path = connect(where, use_listings_cache=False, **_options(scheme))
    except ImportError as error:
        raise _missing(where, str(error), _EXTRAS.get(scheme)) from error
    except ValueError as error:
        raise UserError(f"{mask(where)} cannot be used.", why=mask(str(error)), hint=_SCHEMES) from error
    except Exception as error:
        raise explain(mask(where), error) from error
    return Url(mask(where).partition("?")[0].rstrip("/"), path.rstrip("/"), fs)


_SCHEMES = "use a folder, or a URL such as s3://bucket/folder, webhdfs://host:9870/folder or hdfs://host:8020/folder"


def _options(scheme: str) -> dict[str, Any]:
    """Patience for one request; what is tried again after that is for the caller to say."""
    if scheme in ("s3", "s3a"):
        patience = {"connect_timeout": 3, "read_timeout": 60, "retries": {"max_attempts": 1}}
        return {"config_kwargs": patience}
    return {}


def _missing(where: str, why: str, extra: str | None) -> UserError:
    hint = f"run `pip install 'shoal[{extra}]'`" if extra else "install the package that it names"
    return UserError(f"{mask(where)} cannot be used: a package is not installed.", why=why, hint=hint)


def check(url: Url) -> None:
    """Ask the store for this place, whether or not something is there. StoreFailed if it cannot be used."""
    with asking(url):
        answered(url, lambda: list_below(url))


def answered(url: Url, call: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """What `call` returns; StoreFailed where that takes longer. The call cannot be ended and is left behind."""
    found: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work, name="shoal-asking", daemon=True)
    worker.start()
    worker.join(seconds)
    if failures:
        raise failures[0]
    if not found:
        raise _unreachable(str(url), f"it gave no answer within {seconds:g} s")
    return found[0]


def list_below(url: Url) -> dict[str, int]:
    """All files below a place, by their path from there, with their sizes. None where there is no such place.

    Sees what was written before it was asked for: nothing is remembered here, and stores promise as much.
    """
    # A walk through folders passes over those that cannot be listed, unless it is told not to.
    options = {} if url.is_object_store else {"on_error": "raise"}
    try:
        with asking(url):
            found = url.fs.find(url.path, detail=True, **options)
    except FileNotFoundError:
        return {}
    start = len(url.path) + 1
    return {path[start:]: int(info["size"] or 0) for path, info in found.items() if path.startswith(f"{url.path}/")}


@contextmanager
def asking(url: Url) -> Iterator[None]:
    """Whatever goes wrong inside is a StoreFailed; only a file that is not there stays a FileNotFoundError."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        if _names_bucket(error):
            raise explain(str(url), error) from error
        raise
    except Exception as error:
        raise explain(str(url), error) from error


def explain(shown: str, error: Exception) -> StoreFailed:
    """An error of a store's client, in words. Clients have errors of their own, which are told apart by name."""
    causes = _chain(error)
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    said = mask(next((str(cause).splitlines()[0] for cause in causes if str(cause)), type(error).__name__))
    said = _REQUEST.sub(r"\1", said)  # the same words, whatever was asked for
    if _names_bucket(error):
        return StoreFailed(
            f"There is no bucket {_root(shown)}.",
            why=said,
            hint="check its name and the region, or make the bucket first",
        )
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}:
        return StoreFailed(
            f"No credentials for {shown}.",
            why=f"they are neither in the environment nor in a configuration file ({said})",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for all workers, or run `aws configure`",
        )
    if names & {"PermissionError"}:
        return StoreFailed(
            f"{shown} may not be used with these credentials.",
            why=said,
            hint="check who you are there (`aws sts get-caller-identity`) and what that user may do",
        )
    if "libhdfs" in said or "libjvm" in said or "JAVA_HOME" in said:
        return StoreFailed(
            f"{shown} cannot be used from this machine.",
            why=said,
            hint="hdfs:// needs Hadoop's libhdfs and Java: set HADOOP_HOME, JAVA_HOME and CLASSPATH "
            "(`hadoop classpath --glob`), or use webhdfs://, which needs neither",
        )
    if names & {"ConnectionError", "TimeoutError", "ClientConnectionError", "HTTPClientError", "FSTimeoutError"}:
        return _unreachable(shown, said)
    return StoreFailed(f"{shown} failed.", why=f"{type(error).__name__}: {said}", hint="try again; see docs/files.md")


def _unreachable(shown: str, why: str) -> StoreFailed:
    return StoreFailed(
        f"{_root(shown)} cannot be reached.",
        why=why,
        hint="check the network and the address (for S3: AWS_ENDPOINT_URL and the region)",
    )


def _root(shown: str) -> str:
    """The bucket, or the host."""
    return "/".join(shown.split("/")[:3])


def _names_bucket(error: BaseException) -> bool:
    return any("NoSuchBucket" in type(cause).__name__ or "bucket does not" in str(cause) for cause in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that led to it."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 20:
        causes.append(cause)
    return causes
