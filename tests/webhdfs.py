"""A file system in memory that speaks WebHDFS, for tests of those who speak it: fsspec, and Hadoop's own client.

Two servers, as in a cluster. A namenode knows names, and sends whoever wants to read or write on to a datanode, which
has the bytes. Answers are those of Hadoop's documentation of WebHDFS 3.x, down to the names of exceptions and the
fields of a status; a rename, a delete and a create refuse what HDFS refuses, in its way. What it does not have:
blocks and copies of them, leases, rights, quotas, snapshots, tokens, failures. Of those
nothing is learned from it.
"""

import json
import posixpath
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"
BLOCK_BYTES = 128 << 20
_HDFS, _FS = "org.apache.hadoop.hdfs.protocol.", "org.apache.hadoop.fs."


class Refusal(Exception):
    """An exception of Hadoop's, by the name of its class, and the status with which it is sent."""

    def __init__(self, java_class: str, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.java_class, self.status = java_class, status


def no_file(path: str) -> Refusal:
    return Refusal("java.io.FileNotFoundException", f"File {path or '/'} does not exist.", 404)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A file, or a folder, which has no bytes."""

    number: int
    data: bytearray | None
    permission: str
    owner: str
    time_ms: int = field(default_factory=lambda: int(time.time() * 1000))


class Names:
    """Everything there is, by path without a slash in the end. All calls are made with `lock` held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.asked: set[str] = set()
        """Operations that clients have used, and `DATA` with the name of those that came to the datanode."""
        self._numbers = count(16386)
        self._entries = {"": self._new(None, "hdfs")}

    def _new(self, data: bytearray | None, owner: str, permission: str = "") -> Entry:
        default = "755" if data is None else "644"
        return Entry(number=next(self._numbers), data=data, owner=owner, permission=permission or default)

    def find(self, path: str) -> Entry:
        if path not in self._entries:
            raise no_file(path)
        return self._entries[path]

    def find_file(self, path: str) -> bytearray:
        if (data := self.find(path).data) is None:
            raise Refusal("java.io.FileNotFoundException", f"Path is not a file: {path or '/'}", 404)
        return data

    def children(self, path: str) -> list[str]:
        start = path + "/"
        return sorted(name for name in self._entries if name.startswith(start) and "/" not in name[len(start) :])

    def make_folders(self, path: str, owner: str, permission: str = "") -> None:
        if path in self._entries:
            if self._entries[path].data is not None:
                raise Refusal(_FS + "ParentNotDirectoryException", f"{path} (is not a directory)")
            return
        self.make_folders(posixpath.dirname(path).rstrip("/"), owner, permission)
        self._entries[path] = self._new(None, owner, permission)

    def make_file(self, path: str, owner: str, permission: str, *, may_replace: bool) -> bytearray:
        """A file of no bytes, which everybody sees from now on, with the folders above it."""
        old = self._entries.get(path)
        if old is not None and (old.data is None or not may_replace):
            what = "already exists as a directory" if old.data is None else "for client 127.0.0.1 already exists"
            raise Refusal(_FS + "FileAlreadyExistsException", f"{path} {what}")
        self.make_folders(posixpath.dirname(path).rstrip("/"), owner)
        data = bytearray()
        self._entries[path] = self._new(data, owner, permission)
        return data

    def rename(self, path: str, target: str) -> bool:
        """Whether it was done. Into a folder that exists, never over something, never into itself."""
        if path not in self._entries or not path:
            return False
        if path == target:
            return self._entries[path].data is not None
        if target in self._entries and self._entries[target].data is None:
            target = f"{target}/{posixpath.basename(path)}"
        parent = self._entries.get(posixpath.dirname(target).rstrip("/"))
        if target in self._entries or target.startswith(path + "/") or parent is None or parent.data is not None:
            return False
        for name in [name for name in self._entries if name == path or name.startswith(path + "/")]:
            self._entries[target + name[len(path) :]] = self._entries.pop(name)
        return True

    def delete(self, path: str, *, is_recursive: bool) -> bool:
        if path not in self._entries or not path:
            return False
        if self.children(path) and not is_recursive:
            raise Refusal(_FS + "PathIsNotEmptyDirectoryException", f"`{path} is non empty': Directory is not empty")
        for name in [name for name in self._entries if name == path or name.startswith(path + "/")]:
            del self._entries[name]
        return True

    def status(self, path: str, suffix: str = "") -> dict[str, Any]:
        entry = self.find(path)
        is_file = entry.data is not None
        return {
            "accessTime": entry.time_ms if is_file else 0,
            "blockSize": BLOCK_BYTES if is_file else 0,
            "childrenNum": len(self.children(path)),
            "fileId": entry.number,
            "group": "supergroup",
            "length": len(entry.data or b""),
            "modificationTime": entry.time_ms,
            "owner": entry.owner,
            "pathSuffix": suffix,
            "permission": entry.permission,
            "replication": 1 if is_file else 0,
            "storagePolicy": 0,
            "type": "FILE" if is_file else "DIRECTORY",
        }

    def list(self, path: str) -> dict[str, Any]:
        if self.find(path).data is not None:
            found = [self.status(path)]
        else:
            found = [self.status(child, posixpath.basename(child)) for child in self.children(path)]
        return {"FileStatuses": {"FileStatus": found}}

    def summary(self, path: str) -> dict[str, Any]:
        self.find(path)
        under = [entry for name, entry in self._entries.items() if name == path or name.startswith(path + "/")]
        files = [entry.data for entry in under if entry.data is not None]
        size = sum(map(len, files))
        counts = {"directoryCount": len(under) - len(files), "fileCount": len(files)}
        return {"ContentSummary": {**counts, "length": size, "quota": -1, "spaceConsumed": size, "spaceQuota": -1}}

    def blocks(self, path: str, datanode: str) -> dict[str, Any]:
        size = len(self.find(path).data or b"")
        places = {"cachedHosts": [], "hosts": ["localhost"], "names": [datanode], "topologyPaths": []}
        block = {**places, "corrupt": False, "length": size, "offset": 0, "storageTypes": ["DISK"]}
        return {"BlockLocations": {"BlockLocation": [block] if size else []}}


class Handler(BaseHTTPRequestHandler):
    """What both servers have in common. An operation `X` by a method `M` is answered by the method `M_X`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    names: Names
    datanode: str
    path_asked: str
    query: dict[str, str]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer_to(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = {name.lower(): values[0] for name, values in parse_qs(parts.query).items()}
        self.path_asked = unquote(parts.path).removeprefix(PREFIX).rstrip("/")
        op = self.query.get("op", "").upper()
        try:
            act = getattr(self, f"{method}_{op}", None)
            if act is None or not parts.path.startswith(PREFIX):
                why = f'Invalid value for webhdfs parameter "op": No enum constant {_HDFS}{op}'
                raise Refusal("java.lang.IllegalArgumentException", why, 400)
            act()
        except Refusal as refusal:
            self.skip_body()
            name = refusal.java_class.rpartition(".")[2]
            error = {"exception": name, "javaClassName": refusal.java_class, "message": str(refusal)}
            self.reply({"RemoteException": error}, refusal.status)

    def do_GET(self) -> None:
        self._answer_to("GET")

    def do_PUT(self) -> None:
        self._answer_to("PUT")

    def do_POST(self) -> None:
        self._answer_to("POST")

    def do_DELETE(self) -> None:
        self._answer_to("DELETE")

    @property
    def user(self) -> str:
        return self.query.get("user.name", "dr.who")

    def is_set(self, name: str) -> bool:
        return self.query.get(name, "false").lower() == "true"

    def answer(self, status: int, body: bytes = b"", kind: str = "application/octet-stream", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), "application/json")

    def body(self) -> Iterator[bytes]:
        """What the client sends, as it comes: Hadoop's does not know how much that will be."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def skip_body(self) -> None:
        for _ in self.body():
            pass


class NameNode(Handler):
    """Names. Bytes that are sent here are not looked at: who wants to write is told where."""

    def _answer_to(self, method: str) -> None:
        with self.names.lock:
            super()._answer_to(method)
            self.names.asked.add(self.query.get("op", "").upper())

    def _send_on(self) -> None:
        self.skip_body()
        place = f"http://{self.datanode}{self.path}&namenoderpcaddress=localhost:8020"
        if self.is_set("noredirect"):
            self.reply({"Location": place})
        else:
            self.answer(307, Location=place)

    def GET_OPEN(self) -> None:
        self.names.find_file(self.path_asked)
        self._send_on()

    def PUT_CREATE(self) -> None:
        self._send_on()

    def POST_APPEND(self) -> None:
        self.names.find_file(self.path_asked)
        self._send_on()

    def GET_GETFILESTATUS(self) -> None:
        self.reply({"FileStatus": self.names.status(self.path_asked)})

    def GET_LISTSTATUS(self) -> None:
        self.reply(self.names.list(self.path_asked))

    def GET_LISTSTATUS_BATCH(self) -> None:
        found = self.names.list(self.path_asked)
        self.reply({"DirectoryListing": {"partialListing": found, "remainingEntries": 0}})

    def GET_GETCONTENTSUMMARY(self) -> None:
        self.reply(self.names.summary(self.path_asked))

    def GET_GETFILEBLOCKLOCATIONS(self) -> None:
        self.reply(self.names.blocks(self.path_asked, self.datanode))

    def GET_GETHOMEDIRECTORY(self) -> None:
        self.reply({"Path": f"/user/{self.user}"})

    def PUT_MKDIRS(self) -> None:
        self.names.make_folders(self.path_asked, self.user, self.query.get("permission", ""))
        self.reply({"boolean": True})

    def PUT_RENAME(self) -> None:
        target = self.query.get("destination", "").rstrip("/")
        if not target.startswith("/"):
            why = 'Invalid value for webhdfs parameter "destination": it is not an absolute path'
            raise Refusal("java.lang.IllegalArgumentException", why, 400)
        self.reply({"boolean": self.names.rename(self.path_asked, target)})

    def PUT_SETPERMISSION(self) -> None:
        self.names.find(self.path_asked).permission = self.query.get("permission", "755")
        self.answer(200)

    def PUT_SETTIMES(self) -> None:
        self.names.find(self.path_asked).time_ms = int(self.query.get("modificationtime", "0"))
        self.answer(200)

    def DELETE_DELETE(self) -> None:
        self.reply({"boolean": self.names.delete(self.path_asked, is_recursive=self.is_set("recursive"))})


class DataNode(Handler):
    """Bytes. It knows only those whom a namenode has sent."""

    def _answer_to(self, method: str) -> None:
        if "namenoderpcaddress=" not in self.path:
            self.answer(400)
            return
        super()._answer_to(method)
        self.names.asked.add(f"DATA {self.query.get('op', '').upper()}")

    def GET_OPEN(self) -> None:
        start, length = int(self.query.get("offset", 0)), int(self.query.get("length", 1 << 60))
        with self.names.lock:
            data = self.names.find_file(self.path_asked)
            if start > len(data):
                raise Refusal("java.io.IOException", f"Offset={start} out of the range [0, {len(data)})")
            part = bytes(data[start : start + length])
        self.answer(200, part)

    def PUT_CREATE(self) -> None:
        with self.names.lock:
            data = self.names.make_file(
                self.path_asked,
                self.user,
                self.query.get("permission", ""),
                may_replace=self.is_set("overwrite"),
            )
        self._write(data)
        self.answer(201, Location=f"hdfs://localhost:8020{self.path_asked}")

    def POST_APPEND(self) -> None:
        with self.names.lock:
            data = self.names.find_file(self.path_asked)
        self._write(data)
        self.answer(200)

    def _write(self, data: bytearray) -> None:
        for part in self.body():
            data += part


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """One that runs. `url` is where clients find it."""

    url: str
    names: Names


@contextmanager
def _served(kind: type[Handler], **given: object) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), given)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def webhdfs_server() -> Iterator[FileSystem]:
    """An empty file system."""
    names = Names()
    with ExitStack() as stack:
        datanode = stack.enter_context(_served(DataNode, names=names))
        namenode = stack.enter_context(_served(NameNode, names=names, datanode=datanode))
        yield FileSystem(url=f"webhdfs://{namenode}", names=names)
