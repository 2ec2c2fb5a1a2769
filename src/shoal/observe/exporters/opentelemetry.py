"""Numbers of a run as OpenTelemetry metrics, sent by OTLP over HTTP."""

import logging
from collections.abc import Sequence
from typing import Any

from shoal.files import mask
from shoal.observe.runs import RunInfo
from shoal.observe.scalars import PARTS, Scalars
from shoal.spec.event import Event
from shoal.version import __version__

MAX_POINTS = 2000
"""In one request: receivers refuse large ones."""
TIMEOUT_SECONDS = 10


def open_exporter(run: RunInfo, place: str) -> "OtlpMetrics":
    return OtlpMetrics(run, place)


class OtlpMetrics:
    """Every step is a point of a gauge, at the time it was measured: also for a run that is over.

    The SDK's own meters know only the newest value, and only now; so points are handed to its exporter directly.
    Without a place it goes where OTEL_EXPORTER_OTLP_ENDPOINT says, or to this machine.
    """

    def __init__(self, run: RunInfo, place: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource

        # It tells of failures in its log, and returns them; those who look at the terminal are told by us.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._place = place
        self._exporter = OTLPMetricExporter(endpoint=place or None, timeout=TIMEOUT_SECONDS)
        self._resource = Resource.create(
            {
                "service.name": "shoal",
                "service.version": __version__,
                "service.instance.id": run.name,
                "host.name": run.host,
            }
        )
        self._run = run.name

    def write(self, rows: Sequence[Scalars]) -> None:
        points: dict[str, list[Any]] = {}
        num_points = 0
        for row in rows:
            # The step is a number of its own: as an attribute it would make every step a series of one point.
            for name, value in {**row.values, **({"step": row.step} if "loss" in row.values else {})}.items():
                metric, attributes = _metric_of(name)
                points.setdefault(metric, []).append(self._point(row, value, attributes))
                num_points += 1
            if num_points >= MAX_POINTS:
                self._send(points)
                points, num_points = {}, 0
        if points:
            self._send(points)

    def event(self, event: Event) -> None:
        """Metrics have no place for events."""

    def close(self, status: str) -> None:
        self._exporter.shutdown()

    def _point(self, row: Scalars, value: float, attributes: dict[str, str]) -> Any:
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        return NumberDataPoint(
            attributes={"run": self._run, **attributes},
            start_time_unix_nano=round(row.time * 1e9),
            time_unix_nano=round(row.time * 1e9),
            value=float(value),
        )

    def _send(self, points: dict[str, list[Any]]) -> None:
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricExportResult,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = [
            Metric(name=name, description="", unit=_UNITS.get(name, ""), data=Gauge(data_points=found))
            for name, found in points.items()
        ]
        scope = ScopeMetrics(scope=InstrumentationScope("shoal", __version__), metrics=metrics, schema_url="")
        data = MetricsData([ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise OSError(f"the receiver{f' at {mask(self._place)}' if self._place else ''} did not take them")


# Other numbers have none: those of unit "1" get the ending `_ratio` where a receiver hands them on to Prometheus.
_UNITS = {"shoal.step_seconds": "s", "shoal.samples_per_second": "{sample}/s"}


def _metric_of(name: str) -> tuple[str, dict[str, str]]:
    if name in PARTS:
        return "shoal.time_share", {"part": name}
    if name in ("step", "loss", "lr", "epoch", "grad_norm", "samples_per_second", "step_seconds"):
        return f"shoal.{name}", {}
    return "shoal.number", {"name": name}
