"""Numbers of a run for Prometheus to ask for, while the run goes on."""

from collections.abc import Sequence
from typing import Any

from shoal.observe.runs import RunInfo
from shoal.observe.scalars import PARTS, Scalars
from shoal.spec.errors import UserError
from shoal.spec.event import Event

DEFAULT_PLACE = "127.0.0.1:9464"
_ABOUT = {
    "loss": "Loss of the newest step",
    "lr": "Learning rate of the newest step",
    "epoch": "Epoch of the newest step, from 0",
    "grad_norm": "Norm of the gradient of the newest step",
    "samples_per_second": "Samples a second over all workers, in the newest step",
    "step_seconds": "Seconds that the newest step took",
}


def open_exporter(run: RunInfo, place: str) -> "PrometheusPage":
    return PrometheusPage(run, place or DEFAULT_PLACE)


def parse_place(place: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `PORT`. Without a host only this machine can ask."""
    host, _, port = place.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"--to prometheus:{place} is not an address.",
            why="it ends with the port to listen on",
            hint=f"for example: `--to prometheus:{DEFAULT_PLACE}`, or with 0.0.0.0 for other machines to ask",
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class PrometheusPage:
    """A page with the newest numbers at `http://HOST:PORT/metrics`. `port` is where it listens."""

    def __init__(self, run: RunInfo, place: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        host, port = parse_place(place)
        self._labels = {"run": run.name}
        registry = CollectorRegistry()

        def gauge(name: str, about: str, *labels: str) -> Any:
            return Gauge(f"shoal_{name}", about, ["run", *labels], registry=registry)

        self._gauges = {name: gauge(name, about) for name, about in _ABOUT.items()}
        self._step = gauge("step", "Number of the newest step, from 0")
        self._time = gauge("step_time_seconds", "When the newest step ended, in seconds since 1970")
        self._parts = gauge("time_share", "Part of the newest step that went into this, mean over ranks", "part")
        self._numbers = gauge("number", "The newest of the numbers that the script has logged", "name")
        self._workers = gauge("workers", "Workers that take part")
        self._alert = gauge("alert", "1 while something is wrong, 0 once it is over", "rule", "rank")
        self._events = Counter("shoal_events", "Events of the journal by kind", ["run", "kind"], registry=registry)
        if run.num_workers is not None:
            self._workers.labels(**self._labels).set(run.num_workers)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"Cannot listen on {host}:{port} for Prometheus.",
                why=error.strerror or str(error),
                hint="name another port: `--to prometheus:9465`",
            ) from error
        self.port = int(self._server.server_port)

    def write(self, rows: Sequence[Scalars]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._gauge(name).set(value)
            if "loss" in row.values:
                self._step.labels(**self._labels).set(row.step)
                self._time.labels(**self._labels).set(row.time)

    def event(self, event: Event) -> None:
        self._events.labels(kind=event.kind, **self._labels).inc()
        members = event.data.get("members")
        if event.kind == "world" and isinstance(members, list):
            self._workers.labels(**self._labels).set(len(members))
        elif event.kind == "alert":
            rank = "" if event.rank is None else str(event.rank)
            place = self._alert.labels(rule=str(event.data.get("rule")), rank=rank, **self._labels)
            place.set(0 if event.data.get("is_resolved") else 1)

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Any:
        if name in self._gauges:
            return self._gauges[name].labels(**self._labels)
        if name in PARTS:
            return self._parts.labels(part=name, **self._labels)
        return self._numbers.labels(name=name, **self._labels)
