"""The server of the page: addresses and what is behind them. Reading is done in threads, one run's at a time."""

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.dash import about, logs
from shoal.dash.built import PageFile
from shoal.dash.curves import to_curves
from shoal.dash.door import Sessions
from shoal.dash.heat import QUANTITIES
from shoal.dash.index import SORTS, Listed, Query, RunIndex, plain
from shoal.dash.jobs import Jobs
from shoal.dash.opened import IDLE_SECONDS, OpenRun, OpenRuns
from shoal.dash.stream import MAX_STREAMS, Streams
from shoal.dash.world import plain_event, tell_world
from shoal.observe.clean import one_line
from shoal.observe.runs import RunInfo, list_logs, read_run
from shoal.spec.errors import UserError
from shoal.spec.event import Event
from shoal.web.answers import answer, answer_bytes, answer_error, read_body, whole, whole_or_none
from shoal.web.door import SHIELDS, Door, Refusal

MAX_CURVES = 64
MAX_RUNS_AT_ONCE = 16
EXPLAIN_AGE_SECONDS = 10.0
EXPLAIN_SECONDS = 120.0


class Dash:
    """What all requests share."""

    def __init__(
        self, home: str, door: Door, page: Mapping[str, PageFile], on_login: Callable[[], None] = lambda: None
    ) -> None:
        self.door = door
        self.page = page
        self.sessions = Sessions()
        self.index = RunIndex(home)
        self.opened = OpenRuns()
        self.is_over = False
        self.jobs = Jobs()
        self.streams = Streams(self.index, lambda: self.is_over, self.jobs.version)
        self.on_login = on_login
        self._explained: dict[str, tuple[Any, float, bytes]] = {}
        self._explaining = asyncio.Lock()
        self._is_watched = False

    @property
    def cookie_name(self) -> str:
        # Cookies do not know ports: two servers on one machine must not take each other's.
        return f"shoal_dash_{self.door.port}"

    def app(self) -> ASGIApp:
        routes = [
            Route("/api/login", self.log_in, methods=["POST"]),
            Route("/api/logout", self.log_out, methods=["POST"]),
            Route("/api/runs", self.list_runs),
            Route("/api/runs/{id}", self.show_run),
            Route("/api/runs/{id}/series", self.show_series),
            Route("/api/runs/{id}/heat", self.show_heat),
            Route("/api/runs/{id}/world", self.show_world),
            Route("/api/runs/{id}/events", self.show_events),
            Route("/api/runs/{id}/logs", self.show_logs),
            Route("/api/runs/{id}/search", self.search_logs),
            Route("/api/runs/{id}/checkpoints", self.show_checkpoints),
            Route("/api/runs/{id}/checkpoints", self.check_checkpoint, methods=["POST"]),
            Route("/api/runs/{id}/explain", self.show_explanation),
            Route("/api/runs/{id}/system", self.show_system),
            Route("/api/runs/{id}/stacks", self.take_stacks, methods=["POST"]),
            Route("/api/system", self.show_all_systems),
            Route("/api/jobs", self.show_jobs),
            Route("/api/news", self.stream_news),
            Route("/api/{rest:path}", _nothing_here),
            Route("/page/{name}", self.show_file),
            Route("/{rest:path}", self.show_page),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={UserError: _tell_mistake, HTTPException: _tell_http, Exception: _tell_bug},
        )
        return _Guard(app, self)

    # --- coming in

    async def log_in(self, request: Request) -> Response:
        token = (await read_body(request)).get("token")
        cookie = self.sessions.log_in(token) if isinstance(token, str) else None
        if cookie is None:
            error = UserError(
                "This link has been used, or belongs to another `shoal dash`.",
                why="a link is good for one login",
                hint="open the newest link in the terminal where `shoal dash` runs",
            )
            return answer_error(request, error, 401)
        self.on_login()
        done = answer(request, {"ok": True})
        done.set_cookie(self.cookie_name, cookie, httponly=True, samesite="strict", path="/")
        return done

    async def log_out(self, request: Request) -> Response:
        self.sessions.log_out(self.cookie_of(request.headers.get("cookie", "")))
        done = answer(request, {"ok": True})
        done.delete_cookie(self.cookie_name, httponly=True, samesite="strict", path="/")
        return done

    def cookie_of(self, header: str) -> str:
        try:
            found = SimpleCookie(header[:8192]).get(self.cookie_name)
        except CookieError:
            return ""
        return found.value if found else ""

    # --- the page itself

    async def show_file(self, request: Request) -> Response:
        file = self.page.get(request.path_params["name"])
        if file is None:
            return await _nothing_here(request)
        return _file(request, file, "public, max-age=31536000, immutable")

    async def show_page(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return await _nothing_here(request)
        self._read_ahead(request)
        return _file(request, self.page["index.html"], "no-store")

    def _read_ahead(self, request: Request) -> None:
        """Begin to read the run that an address names, for whoever may see it: soon its page asks for it."""
        _, kind, run_id, *_ = [*request.url.path.split("/"), "", ""]
        listed = self.index.find(run_id) if kind == "run" else None
        if listed and self.sessions.is_known(self.cookie_of(request.headers.get("cookie", ""))):
            self._watch_open()
            self._begin(self.opened.get(listed.row.run.path).names)

    def _begin(self, work: Callable[[], object]) -> None:
        """Have something done in a thread. Whoever needs it does it again, and is told what went wrong."""
        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(lambda done: done.exception())

    # --- runs

    async def list_runs(self, request: Request) -> Response:
        params = request.query_params
        sort = params.get("sort", "created")
        if sort not in SORTS:
            raise UserError(f"Runs cannot be sorted by {sort[:40]!r}.")
        query = Query(
            search=params.get("search", "")[:200],
            status=params.get("status", "")[:40],
            sort=sort,
            is_ascending=params.get("order") == "up",
            offset=whole(params, "offset", 0, 0, 10**9),
            limit=whole(params, "limit", 100, 1, 500),
        )
        looking = asyncio.get_running_loop().run_in_executor(None, self.index.refresh, 1.0)
        # The first look at many runs takes a while: what is there by then is shown.
        await asyncio.wait([looking], timeout=0.15 if self.index.num_read else 0.3)
        return answer(request, await asyncio.to_thread(self.index.page, query))

    async def show_run(self, request: Request) -> Response:
        listed, opened = await self._listed(request), await self._opened(request)

        def tell() -> dict[str, Any]:
            run, events = _now(listed), opened.events()
            newest = self.index.find(listed.id) or listed
            return {**plain(newest), "status": run.status, **about.tell_run(run, events), "series": opened.names()}

        await asyncio.to_thread(self.index.refresh, 1.0)
        return answer(request, await asyncio.to_thread(tell))

    async def show_series(self, request: Request) -> Response:
        opened, params = await self._opened(request), request.query_params
        names = params.getlist("name")[:MAX_CURVES]
        points = whole(params, "points", 1000, 10, 5000)
        first, last = whole_or_none(params, "first"), whole_or_none(params, "last")

        def read() -> dict[str, Any]:
            known = opened.names()
            wanted = [name for name in known if not names or name in names][:MAX_CURVES]
            return to_curves(opened.series(wanted, points, first, last))

        return answer(request, await asyncio.to_thread(read))

    async def show_heat(self, request: Request) -> Response:
        opened, quantity = await self._opened(request), request.query_params.get("of", "own")
        if quantity not in QUANTITIES:
            raise UserError(f"There is no heat map of {quantity[:40]!r}.")
        columns = whole(request.query_params, "columns", 300, 10, 1000)
        return answer(request, await asyncio.to_thread(opened.heat, quantity, columns))

    async def show_world(self, request: Request) -> Response:
        listed, opened = await self._listed(request), await self._opened(request)

        def tell() -> dict[str, Any]:
            run = _now(listed)
            return tell_world(run, [event for event in opened.events() if event.time >= run.created], time.time())

        return answer(request, await asyncio.to_thread(tell))

    async def show_events(self, request: Request) -> Response:
        opened, params = await self._opened(request), request.query_params
        search, kind = params.get("search", "")[:200].casefold(), params.get("kind", "")[:64]
        limit, before = whole(params, "limit", 200, 1, 1000), whole_or_none(params, "before")
        rank = whole_or_none(params, "rank")

        def tell() -> dict[str, Any]:
            events = opened.events()
            kinds: dict[str, int] = {}
            for event in events:
                kinds[event.kind] = kinds.get(event.kind, 0) + 1
            found = [
                {"number": number, **plain_event(event)}
                for number, event in enumerate(events)
                if (not kind or event.kind == kind)
                and (rank is None or event.rank == rank)
                and (before is None or number < before)
                and (not search or _holds(event, search))
            ]
            shown = {one_line(name): count for name, count in sorted(kinds.items())}
            return {"total": len(events), "matching": len(found), "kinds": shown, "events": found[-limit:][::-1]}

        return answer(request, await asyncio.to_thread(tell))

    async def show_logs(self, request: Request) -> Response:
        listed, params = await self._listed(request), request.query_params
        path, rank = listed.row.run.path, whole(params, "rank", 0, 0, 10**9)
        start, end = whole_or_none(params, "start"), whole_or_none(params, "end")

        def read() -> dict[str, Any]:
            if rank not in list_logs(path):
                raise UserError(f"Rank {rank} has not printed anything.", hint="choose another rank")
            try:
                return logs.read_before(path, rank, end) if start is None else logs.read_after(path, rank, start)
            except OSError as error:
                raise UserError(f"The log of rank {rank} cannot be read.", why=error.strerror or "") from None

        return answer(request, await asyncio.to_thread(read))

    async def search_logs(self, request: Request) -> Response:
        listed, params = await self._listed(request), request.query_params
        path, text = listed.row.run.path, params.get("text", "")[:200]
        if not text:
            raise UserError("There is nothing to search for.", hint="type some words")
        rank = whole_or_none(params, "rank")
        ranks = [each for each in list_logs(path) if rank is None or each == rank]
        return answer(request, await asyncio.to_thread(logs.search, path, ranks, text))

    async def show_checkpoints(self, request: Request) -> Response:
        path = (await self._listed(request)).row.run.path
        return answer(request, {"checkpoints": await asyncio.to_thread(about.tell_checkpoints, path)})

    async def check_checkpoint(self, request: Request) -> Response:
        path, body = (await self._listed(request)).row.run.path, await read_body(request)
        folder, name = str(body.get("folder", "")), str(body.get("name", ""))
        found = await asyncio.to_thread(about.check_checkpoint, path, folder, name)
        if found is None:
            raise UserError(
                "This checkpoint is not there any more.",
                why="runs remove old ones when they save new ones",
                hint="choose another one",
            )
        return answer(request, found)

    async def show_explanation(self, request: Request) -> Response:
        listed = await self._listed(request)
        return answer_bytes(request, await self._explain(listed))

    async def _explain(self, listed: Listed) -> bytes:
        """What `shoal explain --json` says, from a process of its own: all metrics are in memory for a moment."""
        async with self._explaining:
            known = self._explained.get(listed.id)
            stamp = (listed.stamp, listed.row.step)
            if known and (known[0] == stamp or time.monotonic() - known[1] < EXPLAIN_AGE_SECONDS):
                return known[2]
            command = (sys.executable, "-m", "shoal", "explain", listed.row.run.path, "--json")
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, stdin=-3)
            try:
                out, err = await asyncio.wait_for(process.communicate(), EXPLAIN_SECONDS)
            except BaseException:
                process.kill()
                await process.wait()
                raise
            if process.returncode != 0 or not out:
                why = err.decode("utf-8", "replace").strip().removeprefix("error: ")
                raise UserError("This run cannot be explained.", why=one_line(why)[-500:])
            if len(self._explained) > MAX_RUNS_AT_ONCE:
                self._explained.clear()
            self._explained[listed.id] = stamp, time.monotonic(), out
            return out

    async def show_system(self, request: Request) -> Response:
        opened, params = await self._opened(request), request.query_params
        seconds, points = whole(params, "seconds", 600, 10, 7200), whole(params, "points", 300, 10, 2000)
        nodes = await asyncio.to_thread(lambda: about.tell_system(opened.system(), seconds, points))
        return answer(request, {"nodes": nodes})

    async def show_all_systems(self, request: Request) -> Response:
        """The nodes of all runs that go on now, each with the runs that have workers there."""
        self._watch_open()
        seconds, points = whole(request.query_params, "seconds", 600, 10, 7200), 200

        def tell() -> list[dict[str, Any]]:
            self.index.refresh(1.0)
            nodes: dict[str, dict[str, Any]] = {}
            for listed in self.index.running()[:MAX_RUNS_AT_ONCE]:
                row = plain(listed)
                for node in about.tell_system(self.opened.get(listed.row.run.path).system(), seconds, points):
                    best = nodes.get(node["node"])
                    runs = [*(best["runs"] if best else ()), {"id": row["id"], "name": row["name"]}]
                    nodes[node["node"]] = {**(best if best and best["time"] > node["time"] else node), "runs": runs}
            return list(nodes.values())

        return answer(request, {"nodes": await asyncio.to_thread(tell)})

    async def take_stacks(self, request: Request) -> Response:
        from shoal.engine.native import find_py_spy
        from shoal.hanging import add_native, ask_running, read_stacks, tell_stack

        listed = await self._listed(request)
        is_native = "native" in request.query_params

        def ask() -> list[dict[str, Any]]:
            run = _now(listed)
            found = read_stacks(ask_running(run, {"verb": "stacks"})["stacks"], ())
            native = add_native(run, found, is_wanted=is_native)
            texts = {stack.rank: stack.text or stack.why_none for stack in found} | native
            return [
                {
                    "rank": stack.rank,
                    "pid": stack.pid,
                    "where": one_line(tell_stack(stack)),
                    "lines": [logs.show(line) for line in texts[stack.rank].strip().split("\n")[:400]],
                }
                for stack in found
            ]

        facts = {"stacks": await asyncio.to_thread(ask), "time": time.time(), "has_native": find_py_spy() is not None}
        return answer(request, facts)

    async def show_jobs(self, request: Request) -> Response:
        """The queue, the nodes, the people and the shares of the service, as its owner or guest may see them."""
        search, state = request.query_params.get("search", "")[:200], request.query_params.get("state", "")[:40]
        is_all = request.query_params.get("all") == "1"
        return answer(request, await asyncio.to_thread(self.jobs.look, search, state, is_all))

    async def stream_news(self, request: Request) -> Response:
        if self.streams.num_open >= MAX_STREAMS:
            raise UserError("Too many pages are open.", hint="close some of them")
        params = request.query_params
        found = [self.index.find(run_id) for run_id in params.getlist("run")[:MAX_RUNS_AT_ONCE]]
        paths = [(one.id, one.row.run.path) for one in found if one]
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        news = self.streams.news(paths, params.getlist("also"))
        return StreamingResponse(news, headers=headers, media_type="text/event-stream")

    async def _listed(self, request: Request) -> Listed:
        """The run an address names. What is new was not seen yet, so it is looked for once more."""
        run_id = request.path_params["id"]
        found = self.index.find(run_id)
        if found is None:
            await asyncio.to_thread(self.index.refresh)
            found = self.index.find(run_id)
        if found is None:
            raise HTTPException(404, "There is no such run.")
        return found

    def _watch_open(self) -> None:
        """See to it that readers are let go of when nobody uses them any more."""
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._let_go)

    def _let_go(self) -> None:
        self._is_watched = False
        if self.opened.let_go():
            self._watch_open()

    async def _opened(self, request: Request) -> OpenRun:
        self._watch_open()
        return self.opened.get((await self._listed(request)).row.run.path)


def _now(listed: Listed) -> RunInfo:
    run = read_run(listed.row.run.path)
    if run is None:
        raise HTTPException(404, "The folder of this run is gone.")
    return run


def _holds(event: Event, search: str) -> bool:
    return search in f"{event.kind} {event.data}".casefold()


def _file(request: Request, file: PageFile, caching: str) -> Response:
    headers = {"content-type": file.type, "cache-control": caching, "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
    return Response(file.body, headers=headers)


async def _nothing_here(request: Request) -> Response:
    return answer_error(request, UserError("There is nothing at this address."), 404)


async def _tell_mistake(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return answer_error(request, error, 400)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer_error(request, UserError(error.detail), error.status_code)


async def _tell_bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    bug = UserError(
        "shoal made a mistake here.",
        why=f"{type(error).__name__}; the terminal of `shoal dash` has the details",
        hint="please report it",
    )
    return answer_error(request, bug, 500)


class _Guard:
    """Stands before everything: hosts, origins and cookies; and puts its shields on every answer."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], dash: Dash) -> None:
        self._app = app
        self._dash = dash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_shielded(message: Message) -> None:
            if message["type"] == "http.response.start":
                shields = [(name.encode(), value.encode()) for name, value in SHIELDS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *shields]}
            await send(message)

        request = Request(scope, receive)
        refusal = self._refuse(request)
        if refusal is None:
            await self._app(scope, receive, send_shielded)
            return
        error = UserError(refusal.message, why=refusal.why, hint=refusal.hint)
        await answer_error(request, error, refusal.status)(scope, receive, send_shielded)

    def _refuse(self, request: Request) -> Refusal | None:
        refusal = self._dash.door.refuse(request.method, request.headers)
        path = request.url.path
        # The page is the same for everybody and holds nothing; all that is known of runs is behind /api.
        if refusal is None and path.startswith("/api/") and path != "/api/login":
            cookie = self._dash.cookie_of(request.headers.get("cookie", ""))
            if not self._dash.sessions.is_known(cookie):
                refusal = Refusal(
                    status=401,
                    message="You are not logged in.",
                    why="this page shows runs only to whoever has its link",
                    hint="open the link in the terminal where `shoal dash` runs",
                )
        return refusal
