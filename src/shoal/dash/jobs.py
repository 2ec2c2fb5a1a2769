"""The queue on the page: what the service tells whoever runs `shoal dash`, with their own token."""

import json
import threading
import time
from hashlib import sha256
from typing import Any

from shoal.service.client import Client, Refused
from shoal.service.places import find_login
from shoal.spec.errors import ShoalError

MAX_ROWS = 500
KEPT_SECONDS = 0.5
_TICKING = ("waited_seconds", "run_seconds", "eta_seconds", "left_seconds")


class Jobs:
    """Asks the service, one request after the other; what all pages watch is asked for once for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client = Client(timeout_seconds=10.0, patience_seconds=0.5)
        self._version, self._looked_at = "", -1e9

    def look(self, search: str = "", state: str = "", is_all: bool = False) -> dict[str, Any]:
        """Everything the page shows; where there is no service, or it does not answer, that."""
        query = {"search": search, "state": state, "all": "1" if is_all else "", "limit": str(MAX_ROWS)}
        with self._lock:
            try:
                if find_login() is None:
                    return {"is_up": False}
                told = self._client.queue(**{name: value for name, value in query.items() if value})
                nodes, shares = self._client.nodes(), self._client.share()
                people, me = self._client.people(), self._client.me()
            except ShoalError as error:
                self._client.close()
                facts = {"message": error.message, "why": error.why, "hint": error.hint}
                return {"is_up": False, "error": facts, "is_refused": isinstance(error, Refused)}
        return {"is_up": True, **told, **nodes, **shares, **people, "me": me["name"], "role": me["role"]}

    def version(self) -> str:
        """A text that is another one when something but the clock has changed."""
        if time.monotonic() > self._looked_at + KEPT_SECONDS:
            told = self.look()
            still = {name: value for name, value in told.items() if name not in ("jobs", "shares", "people")}
            rows = [{name: row[name] for name in row if name not in _TICKING} for row in told.get("jobs", ())]
            people = [
                (row["person"], row["role"], row["num_jobs"], row["num_workers"]) for row in told.get("people", ())
            ]
            self._version = sha256(json.dumps([still, rows, people], sort_keys=True).encode()).hexdigest()
            self._looked_at = time.monotonic()
        return self._version
