"""The service over HTTP: addresses, what is behind them, and who stands before them."""

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.place.cluster import Partition
from shoal.service import acts, audit, people, telling
from shoal.service.asking import MAX_TEXT, parse_workers, read_submission
from shoal.service.job import OVER, STATES, Job, parse_number, parse_numbers
from shoal.service.openapi import describe
from shoal.service.people import ADMIN, USER, Forbidden, Person
from shoal.service.state import Shared
from shoal.spec.errors import ShoalError, UserError
from shoal.spec.prediction import Prediction
from shoal.verb_parser import unknown
from shoal.version import __version__
from shoal.web.answers import answer, answer_bytes, answer_error, read_body, whole
from shoal.web.door import SHIELDS, Door

MAX_BODY_BYTES = 8 << 20
MAX_KEY = 128
_SHIELDS = [(name.encode(), value.encode()) for name, value in SHIELDS.items()]


class NoJob(ShoalError):
    """A number that no job has."""


class Api:
    """What all requests share. Answers to a change come after it is on disk."""

    def __init__(self, shared: Shared, door: Door) -> None:
        self.shared = shared
        self.door = door

    def app(self) -> ASGIApp:
        # An id may be anything, also with slashes: it is looked up, and told to be none.
        routes = [
            Route("/api/jobs", self.submit, methods=["POST"]),
            Route("/api/jobs", self.change_jobs, methods=["PATCH"]),
            Route("/api/jobs/{number:path}", self.show_job),
            Route("/api/queue", self.show_queue),
            Route("/api/nodes", self.show_nodes),
            Route("/api/nodes/{node:path}", self.change_node, methods=["PATCH"]),
            Route("/api/people", self.show_people),
            Route("/api/people/{name:path}/tokens", self.give_token, methods=["POST"]),
            Route("/api/people/{name:path}", self.change_person, methods=["PUT", "DELETE"]),
            Route("/api/tokens/{id:path}", self.revoke_token, methods=["DELETE"]),
            Route("/api/share", self.show_shares),
            Route("/api/audit", self.show_audit),
            Route("/api/me", self.show_me),
            Route("/api/health", self.show_health),
            Route("/api/openapi.json", self.show_description),
        ]
        handlers: dict[Any, Any] = {ShoalError: _tell_mistake, HTTPException: _tell_http, Exception: _tell_bug}
        return _Guard(Starlette(routes=routes, exception_handlers=handlers), self)

    # --- changes

    async def _change(
        self, request: Request, read: Callable[[dict[str, Any]], Callable[..., dict[str, Any]]]
    ) -> Response:
        """Do what a request asks for, once for each key: a lost request, a lost answer and a copy end alike."""
        who: Person = request.state.person
        body = await read_body(request, MAX_BODY_BYTES)
        key = request.headers.get("idempotency-key", "")
        if not key or len(key) > MAX_KEY or not key.isprintable():
            raise UserError(
                "A change needs a key.",
                why="so that it is made once",
                hint="send a new Idempotency-Key with each change",
            )
        # Canonical, so that the same request in another spelling is the same.
        digest = acts.digest_of(request.method, request.url.path, msgspec.json.encode(body, order="sorted"))
        try:
            act = read(body)
        except ShoalError as error:
            # What was done before is done, even if it would be refused by now.
            act = _raiser(error)

        def change(change: Any) -> bytes:
            person = self.shared.known.people.get(who.name, who)
            return acts.once(change, who.name, key, digest, lambda change: act(change, person))

        return answer_bytes(request, await asyncio.wrap_future(self.shared.writer.do(change)))

    async def submit(self, request: Request) -> Response:
        def read(body: dict[str, Any]) -> Callable[..., dict[str, Any]]:
            submission = read_submission(body)
            self.shared.check_fits(submission)
            return lambda change, person: acts.submit(change, person, submission)

        return await self._change(request, read)

    async def change_jobs(self, request: Request) -> Response:
        def read(body: dict[str, Any]) -> Callable[..., dict[str, Any]]:
            verb, jobs = body.get("verb"), body.get("jobs")
            if verb not in acts.JOB_VERBS:
                raise unknown(str(verb)[:40], "verb", acts.JOB_VERBS, f"use one of: {', '.join(acts.JOB_VERBS)}")
            if not isinstance(jobs, list) or not 0 < len(jobs) <= 10_000:
                raise UserError("No job was named.", hint='"jobs" is a list of their numbers')
            numbers, facts = parse_numbers([str(job)[:40] for job in jobs]), {}
            if verb == "resize":
                least, most = parse_workers(body.get("workers"))
                facts = {"least": least, "most": most}
            return lambda change, person: acts.change_jobs(change, person, str(verb), numbers, facts)

        return await self._change(request, read)

    async def change_node(self, request: Request) -> Response:
        node, names = request.path_params["node"], [node.name for node in self.shared.nodes]

        def read(body: dict[str, Any]) -> Callable[..., dict[str, Any]]:
            is_draining, why = body.get("is_draining"), body.get("why", "")
            if not isinstance(is_draining, bool) or not isinstance(why, str) or len(why) > MAX_TEXT:
                raise UserError("is_draining is to be true or false, and why a short text.")
            if is_draining and node not in names:
                raise unknown(node[:60], "node", names, "`shoal nodes` lists them")
            return lambda change, person: acts.drain(change, person, node, is_draining=is_draining, why=why)

        return await self._change(request, read)

    async def change_person(self, request: Request) -> Response:
        name = people.check_name(request.path_params["name"])

        def read(body: dict[str, Any]) -> Callable[..., dict[str, Any]]:
            if request.method == "DELETE":
                return lambda change, person: acts.remove_person(change, person, name)
            account = body.get("account", "")
            if not isinstance(account, str) or len(account) > MAX_TEXT or not (account.isprintable()):
                raise UserError("account is to be a short text.")
            wanted = Person(
                name=name,
                role=people.check_role(body.get("role", USER)),
                account=account,
                max_jobs=_count(body, "max_jobs"),
                max_workers=_count(body, "max_workers"),
            )
            return lambda change, person: acts.add_person(change, person, wanted)

        return await self._change(request, read)

    async def give_token(self, request: Request) -> Response:
        name = people.check_name(request.path_params["name"])

        def read(body: dict[str, Any]) -> Callable[..., dict[str, Any]]:
            days = body.get("days", people.TOKEN_DAYS)
            if not isinstance(days, int | float) or isinstance(days, bool) or not 0 < days <= people.MAX_TOKEN_DAYS:
                raise UserError(f"days may be up to {people.MAX_TOKEN_DAYS}.")
            try:
                digest = bytes.fromhex(body.get("digest", ""))
            except (ValueError, TypeError):
                digest = b""
            if len(digest) != 32:
                raise UserError("digest is to be the sha256 of the token, in hexadecimal.")
            return lambda change, person: acts.give_token(change, person, name, digest, float(days))

        return await self._change(request, read)

    async def revoke_token(self, request: Request) -> Response:
        id = str(request.path_params["id"])
        return await self._change(request, lambda body: lambda change, person: acts.revoke_token(change, person, id))

    # --- looking

    async def show_queue(self, request: Request) -> Response:
        """Jobs that are not over, in the order in which they would start; also the newest that are, with `all=1` or a
        state that only those have."""
        shared, params = self.shared, request.query_params
        owner, state, search = params.get("owner", "")[:80], params.get("state", ""), params.get("search", "")[:200]
        limit, offset = whole(params, "limit", 10_000, 1, 100_000), whole(params, "offset", 0, 0, 1 << 40)
        if state and state not in STATES:
            raise unknown(state[:40], "state", STATES, f"there are: {', '.join(STATES)}")
        now, waits, seen, prospects = shared.store.clock.now(), shared.waits, shared.seen, shared.prospects
        jobs = list(shared.known.jobs.values())
        counts: dict[str, int] = {}
        for job in jobs:
            counts[job.shown_state] = counts.get(job.shown_state, 0) + 1
        if params.get("all") == "1" or state in OVER:
            jobs += await asyncio.to_thread(lambda: shared.reader.over(limit, owner, state=state))
        found = [job for job in jobs if _fits(job, owner, state, search.casefold())]
        found.sort(key=lambda job: _order(job, waits))
        page = found[offset : offset + limit]
        rows = _encode_all(
            telling.tell_job(job, now, waits.get(job.number), seen.get(job.number), prospects.get(job.number))
            for job in page
        )
        told = {"total": len(found), "counts": counts, "jobs": rows, "policy": shared.settings.policy}
        return answer(request, {**told, "problems": dict(shared.problems)})

    async def show_job(self, request: Request) -> Response:
        shared, number = self.shared, parse_number(request.path_params["number"])
        job = shared.known.jobs.get(number) or await asyncio.to_thread(lambda: shared.reader.job(number))
        if job is None:
            raise NoJob(f"There is no job {number}.", hint="`shoal queue --all` shows those there were")
        prospect, insight = shared.prospects.get(number), shared.learned.insights.get(number)
        told = telling.tell_job(
            job, shared.store.clock.now(), shared.waits.get(number), shared.seen.get(number), prospect
        )
        made = insight.predictions if insight is not None else await asyncio.to_thread(_predictions, shared.home, job)
        learned = telling.tell_learned(None if job.is_over else prospect, made)
        rules = shared.settings.partitions.get(job.asked.partition, Partition())
        return answer(request, {**told, **telling.tell_more(job, request.state.person, rules), **learned})

    async def show_nodes(self, request: Request) -> Response:
        shared = self.shared
        machines = {node.name: node for node in shared.machines}
        rows = telling.tell_nodes(shared.nodes, machines, list(shared.known.jobs.values()), shared.known.drained)
        return answer(request, {"nodes": rows, "partitions": shared.settings.partition_names})

    async def show_people(self, request: Request) -> Response:
        shared, who = self.shared, request.state.person
        known = shared.known
        rows = telling.tell_people(
            known.people, known.tokens.values(), list(known.jobs.values()), shared.store.clock.now(), who
        )
        return answer(request, {"people": rows})

    async def show_shares(self, request: Request) -> Response:
        shared = self.shared
        rows = await asyncio.to_thread(lambda: shared.reader.usage())
        settings = shared.settings
        told = telling.tell_shares(
            rows,
            list(shared.known.jobs.values()),
            settings.shares,
            shared.store.clock.now(),
            settings.usage_half_life_seconds,
        )
        return answer(request, {"shares": told, "half_life_seconds": settings.usage_half_life_seconds})

    async def show_audit(self, request: Request) -> Response:
        people.check_may_ask(request.state.person, ADMIN)
        params, reader = request.query_params, self.shared
        after, limit = whole(params, "after", 0, 0, 1 << 40), whole(params, "limit", 1000, 1, 100_000)
        if params.get("verify") == "1":
            expected = params.get("expect", "")[:64]
            verdict = await asyncio.to_thread(lambda: audit.verify(reader.reader.audit(), expected))
            return answer(request, {**_plain(verdict), "is_sound": verdict.is_sound})
        rows = await asyncio.to_thread(lambda: list(reader.reader.audit(after, limit)))
        return answer(request, {"entries": rows})

    async def show_me(self, request: Request) -> Response:
        return answer(request, {**_plain(request.state.person), "version": __version__})

    async def show_health(self, request: Request) -> Response:
        shared = self.shared
        told = {
            "version": __version__,
            "num_jobs": len(shared.known.jobs),
            "num_commits": shared.writer.num_commits,
            "num_changes": shared.writer.num_changes,
            "decided_seconds": shared.decided_seconds,
            "clock_seconds": shared.store.clock.now(),
            "problems": dict(shared.problems),
        }
        return answer(request, told)

    async def show_description(self, request: Request) -> Response:
        return answer(request, describe())


def _encode_all(rows: Iterable[dict[str, Any]]) -> msgspec.Raw:
    """A list as JSON, row by row: ten thousand rows at once would be 20 MB, which the service would keep."""
    text, encoder = bytearray(b"["), msgspec.json.Encoder()
    for row in rows:
        if len(text) > 1:
            text += b","
        encoder.encode_into(row, text, -1)
    text += b"]"
    return msgspec.Raw(text)


def _predictions(home: str, job: Job) -> list[Prediction]:
    """What was expected of a job that is not looked at now, from its run folder."""
    from shoal.observe.predictions import read_predictions

    return read_predictions(os.path.join(home, "runs", job.run_name)) if job.has_run else []


def _raiser(error: ShoalError) -> Callable[..., dict[str, Any]]:
    def refuse(*_: object) -> dict[str, Any]:
        raise error

    return refuse


def _plain(value: Any) -> dict[str, Any]:
    return dict(msgspec.to_builtins(value))


def _fits(job: Job, owner: str, state: str, search: str) -> bool:
    if (owner and job.owner != owner) or (state and job.shown_state != state):
        return False
    return not search or search in f"{job.number} {job.asked.name} {job.owner}".casefold()


def _order(job: Job, waits: Any) -> tuple[int, int, int]:
    """Those that run, then those that wait by their place, then those whose time has not come, then what is over."""
    if job.is_over:
        return 3, 0, -job.number
    if job.is_active:
        return 0, 0, job.number
    wait = waits.get(job.number)
    return (1, wait.position, job.number) if wait is not None and wait.position else (2, 0, job.number)


def _count(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40):
        raise UserError(f"{name} is to be a whole number, or nothing.")
    return value


async def _tell_mistake(request: Request, error: Exception) -> Response:
    status = {UserError: 400, Forbidden: 403, NoJob: 404, acts.Conflict: 409}.get(type(error), 500)  # type: ignore[arg-type]
    assert isinstance(error, ShoalError)
    return answer_error(request, UserError(error.message, why=error.why, hint=error.hint), status)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "`/api/openapi.json` describes what can be asked" if error.status_code in (404, 405) else ""
    return answer_error(request, UserError(error.detail, hint=hint), error.status_code)


async def _tell_bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    bug = UserError("shoal made a mistake here.", why=type(error).__name__, hint="please report it, with service.log")
    return answer_error(request, bug, 500)


class _Guard:
    """Stands before everything, on every method: the host, the origin, then the token. Puts shields on answers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api: Api) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_shielded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_SHIELDS]}
            await send(message)

        request = Request(scope, receive)
        refusal = self._refuse(request)
        if refusal is None:
            await self._app(scope, receive, send_shielded)
        else:
            error, status = refusal
            await answer_error(request, error, status)(scope, receive, send_shielded)

    def _refuse(self, request: Request) -> tuple[UserError, int] | None:
        refusal = self._api.door.refuse(request.method, request.headers)
        if refusal is not None:
            return UserError(refusal.message, why=refusal.why, hint=refusal.hint), refusal.status
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        shared = self._api.shared
        person, why = people.find_person(
            secret.strip() if kind.lower() == "bearer" else "",
            shared.known.tokens,
            shared.known.people,
            shared.store.clock.now(),
        )
        if person is None:
            hint = "an admin makes one: `shoal people token NAME`"
            return UserError("The service does not know you.", why=why, hint=hint), 401
        request.state.person = person
        return None
