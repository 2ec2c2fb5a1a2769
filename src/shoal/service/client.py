"""Ask a service from Python. It needs no library for HTTP.

client = shoal.Client()                      # the service of this machine
job, = client.submit("train.py", workers="1:8", memory="4G")
client.wait(job)
"""

import http.client
import json
import os
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from shoal.service.people import TOKEN_DAYS, digest_token, new_token
from shoal.service.places import Login, find_login, is_down
from shoal.spec.errors import ShoalError, UserError

OVER = ("finished", "failed", "cancelled")
_TROUBLE = (OSError, http.client.HTTPException, ValueError)


LOOK_PATIENCE_SECONDS = 5.0
"""How long somebody who only looks waits for a service that does not answer: a restart takes a second or two."""


class Refused(UserError):
    """The service answered, and its answer is no."""

    status = 0


class Client:
    """One way to one service. Changes are made once, however often a connection breaks on the way.

    Without an address it is the service of this machine, or the one that `shoal login` named. A service that is gone
    is tried again for `patience_seconds`. Not for several threads at once: make one for each.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        *,
        certificate: str = "",
        timeout_seconds: float = 30.0,
        patience_seconds: float = 30.0,
    ) -> None:
        if (address is None) != (token is None):
            raise UserError("An address needs a token, and a token an address.", hint="give both, or none of them")
        self._given = Login(address=address, token=token, certificate=certificate) if address and token else None
        self._timeout, self._patience = timeout_seconds, patience_seconds
        self._connection: http.client.HTTPConnection | None = None
        self._login: Login | None = None

    # --- jobs

    def submit(self, *args: str, dir: str | None = None, held: bool = False, **fields: Any) -> list[int]:
        """Submit a script with its arguments; returns the numbers of the jobs, several only with `array=`.

        `fields` are those of a job in docs/service.md: workers, memory, time, after, ...
        """
        row = {"args": list(args), "dir": os.path.abspath(dir or os.getcwd()), **fields}
        return self.submit_all([row], held=held)

    def submit_all(self, jobs: Sequence[Mapping[str, Any]], *, held: bool = False, key: str = "") -> list[int]:
        """Submit several jobs, all or none. Jobs may name others of them in `after`."""
        answer = self.ask("POST", "/api/jobs", {"jobs": [dict(job) for job in jobs], "held": held}, key=key)
        return [int(number) for number in answer["jobs"]]

    def queue(self, **query: Any) -> dict[str, Any]:
        """The queue: `jobs`, `counts`, `total`. Query: owner, state, search, all, limit, offset."""
        return self.ask("GET", f"/api/queue?{urlencode(query)}")

    def job(self, number: int | str) -> dict[str, Any]:
        return self.ask("GET", f"/api/jobs/{quote(str(number), safe='')}")

    def cancel(self, *jobs: int | str) -> dict[str, Any]:
        return self.change("cancel", jobs)

    def hold(self, *jobs: int | str) -> dict[str, Any]:
        return self.change("hold", jobs)

    def release(self, *jobs: int | str) -> dict[str, Any]:
        return self.change("release", jobs)

    def requeue(self, *jobs: int | str) -> dict[str, Any]:
        return self.change("requeue", jobs)

    def resize(self, job: int | str, workers: int | str) -> dict[str, Any]:
        """Other bounds for a job's workers: 3, or "2:8"."""
        return self.change("resize", [job], workers=workers)

    def change(self, verb: str, jobs: Sequence[int | str], **more: Any) -> dict[str, Any]:
        return self.ask("PATCH", "/api/jobs", {"verb": verb, "jobs": list(jobs), **more})

    def wait(
        self,
        job: int | str,
        timeout_seconds: float | None = None,
        on_look: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait until a job is over; returns what is known of it then."""
        began, pause = time.monotonic(), 0.05
        while True:
            told = self.job(job)
            if on_look is not None:
                on_look(told)
            if told["state"] in OVER:
                return told
            if timeout_seconds is not None and time.monotonic() - began > timeout_seconds:
                raise TimeoutError(f"job {job} is {told['state']} after {timeout_seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    # --- the rest

    def nodes(self) -> dict[str, Any]:
        return self.ask("GET", "/api/nodes")

    def drain(self, node: str, why: str = "", *, is_draining: bool = True) -> dict[str, Any]:
        """Start nothing new on a node, or with `is_draining=False` use it again."""
        body = {"is_draining": is_draining, "why": why}
        return self.ask("PATCH", f"/api/nodes/{quote(node, safe='')}", body)

    def share(self) -> dict[str, Any]:
        return self.ask("GET", "/api/share")

    def people(self) -> dict[str, Any]:
        return self.ask("GET", "/api/people")

    def me(self) -> dict[str, Any]:
        return self.ask("GET", "/api/me")

    def health(self) -> dict[str, Any]:
        return self.ask("GET", "/api/health")

    def audit(self, **query: Any) -> dict[str, Any]:
        """Who did what, for admins. Query: after, limit; with verify=1 whether the log is whole (expect=DIGEST)."""
        return self.ask("GET", f"/api/audit?{urlencode(query)}")

    def put_person(self, name: str, **fields: Any) -> dict[str, Any]:
        """Let somebody in, or change what they may do: role, account, max_jobs, max_workers."""
        return self.ask("PUT", f"/api/people/{quote(name, safe='')}", fields)

    def remove_person(self, name: str) -> dict[str, Any]:
        return self.ask("DELETE", f"/api/people/{quote(name, safe='')}", {})

    def give_token(self, name: str, days: float = TOKEN_DAYS) -> str:
        """A new token for somebody, which is shown this once: the service is told its digest."""
        secret = new_token()
        body = {"digest": digest_token(secret).hex(), "days": days}
        self.ask("POST", f"/api/people/{quote(name, safe='')}/tokens", body)
        return secret

    def revoke_token(self, id: str) -> dict[str, Any]:
        return self.ask("DELETE", f"/api/tokens/{quote(id, safe='')}", {})

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, key: str = "") -> dict[str, Any]:
        """One request. A change carries a key, so that it can be sent again until its answer is here."""
        data = None if body is None else json.dumps(body).encode()
        key = key or secrets.token_hex(16)
        until = time.monotonic() + self._patience
        pause = 0.02
        while True:
            try:
                status, text = self._send(method, path, data, key)
                break
            except _TROUBLE as error:
                self.close()
                if isinstance(error, ssl.SSLCertVerificationError) or time.monotonic() + pause > until:
                    raise self._unreachable(error) from None
                time.sleep(pause)
                # One of this machine costs nothing to look for, and is back within a second.
                pause = min(pause * 1.5, 0.1 if self._given is None else 0.5)
        if status == 200:
            return dict(msgspec.json.decode(text))  # a third of the time of json: a queue may be long
        raise _refusal(status, text)

    def _send(self, method: str, path: str, data: bytes | None, key: str) -> tuple[int, bytes]:
        connection, login = self._connect()
        parts = urlsplit(login.address)
        headers = {"Authorization": f"Bearer {login.token}", "Origin": f"{parts.scheme}://{parts.netloc}"}
        if data is not None:
            headers |= {"Content-Type": "application/json", "Idempotency-Key": key}
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _connect(self) -> tuple[http.client.HTTPConnection, Login]:
        if self._connection is not None and self._login is not None:
            return self._connection, self._login
        # Looked up each time: a service that was started anew may be at another port.
        login = self._given or find_login()
        if self._given is None and is_down():
            # Somebody else may listen at its port by now, and must not be shown a token.
            raise ConnectionRefusedError("it was killed, or is just starting")
        if login is None:
            raise UserError("No service is up on this machine.", hint="`shoal up` starts one")
        parts = urlsplit(login.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{login.address!r} is not the address of a service.", hint="such as https://HOST:4647")
        if parts.scheme == "https":
            context = trust(login.certificate)
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self._timeout, context=context
            )
        elif parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise UserError(
                f"{login.address} is another machine, and nothing would be encrypted.",
                hint="use its https:// address",
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._timeout)
        self._login = login
        return self._connection, login

    def _unreachable(self, error: Exception) -> ShoalError:
        login = self._given or find_login()
        where = login.address if login else "this machine"
        return ShoalError(
            f"The service at {where} does not answer.",
            why=str(error) or type(error).__name__,
            hint="its jobs go on without it; `shoal up` starts it again"
            if self._given is None
            else "see whether it is up",
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trust(certificate: str) -> ssl.SSLContext:
    """Trust exactly this certificate (PEM); without one, the authorities of the system."""
    context = ssl.create_default_context(cadata=certificate or None)
    if certificate:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _refusal(status: int, text: bytes) -> ShoalError:
    try:
        error = json.loads(text)["error"]
        told = {name: str(error.get(name, "")) for name in ("message", "why", "hint")}
    except (ValueError, KeyError, TypeError, AttributeError):
        told = {"message": f"The service answered {status}.", "why": text[:200].decode(errors="replace"), "hint": ""}
    refused = Refused(told["message"], why=told["why"], hint=told["hint"])
    refused.status = status
    return refused
