"""A small server that speaks WebHDFS as its documentation says, in memory. For tests of our side of the conversation.

It redirects reads and writes, shows a file while it is being written, answers a rename that it refuses with `false`,
and makes the folders above a new file, as a namenode does. It is no Hadoop: nothing is learned about HDFS from it.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    files: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def ask(self) -> tuple[str, str, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return query.get("op", ""), unquote(parts.path).removeprefix(PREFIX).rstrip("/"), query, body

    def missing(self, path: str) -> None:
        error = {"exception": "FileNotFoundException", "message": f"File {path} does not exist."}
        self.reply({"RemoteException": error}, 404)

    def redirect(self) -> None:
        mark = "&" if "?" in self.path else "?"
        self.answer(307, Location=f"http://{self.headers['Host']}{self.path}{mark}datanode=true")

    def below(self, path: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{path}/")]

    def status(self, path: str, suffix: str = "") -> dict[str, object]:
        kind = "FILE" if path in self.files else "DIRECTORY"
        size = len(self.files.get(path, b""))
        return {"pathSuffix": suffix, "type": kind, "length": size, "modificationTime": 1}

    def do_GET(self) -> None:
        op, path, query, _ = self.ask()
        if path not in self.files and not self.below(path):
            self.missing(path)
        elif op == "GETFILESTATUS":
            self.reply({"FileStatus": self.status(path)})
        elif op == "LISTSTATUS":
            names = sorted({name[len(path) + 1 :].partition("/")[0] for name in self.below(path)})
            self.reply({"FileStatuses": {"FileStatus": [self.status(f"{path}/{name}", name) for name in names]}})
        elif op == "OPEN" and "datanode" not in query:
            self.redirect()
        else:
            start = int(query.get("offset", 0))
            length = int(query.get("length", 1 << 60))
            self.answer(200, self.files[path][start : start + length])

    def do_PUT(self) -> None:
        op, path, query, body = self.ask()
        if op == "RENAME":
            target = query["destination"]
            is_done = path in self.files and target not in self.files
            if is_done:
                self.files[target] = self.files.pop(path)
            self.reply({"boolean": is_done})
        elif op == "CREATE" and "datanode" not in query:
            self.redirect()
        else:
            self.files[path] = body
            self.answer(201)

    def do_POST(self) -> None:
        _, path, query, body = self.ask()
        if "datanode" not in query:
            self.redirect()
        else:
            self.files[path] += body
            self.answer(200)

    def do_DELETE(self) -> None:
        _, path, _, _ = self.ask()
        gone = [name for name in (path, *self.below(path)) if self.files.pop(name, None) is not None]
        self.reply({"boolean": bool(gone)})


@contextmanager
def webhdfs_server() -> Iterator[str]:
    """The URL of an empty file system."""
    handler = type("Handler", (Handler,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"webhdfs://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
