"""Numbers of a run in MLflow: a tracking server, a database such as sqlite:///mlflow.db, or a folder of old."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from shoal.files import mask
from shoal.observe.clean import one_line
from shoal.observe.exporters.settings import plain_settings
from shoal.observe.runs import RunInfo
from shoal.observe.scalars import Scalars, tag_of
from shoal.spec.errors import UserError
from shoal.spec.event import Event

BATCH = 1000
"""As many numbers does MLflow take in one request."""
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
_STATUS = {"finished": "FINISHED", "imported": "FINISHED", "running": "RUNNING", "stopped": "KILLED"}


def open_exporter(run: RunInfo, place: str) -> "MlflowRun":
    return MlflowRun(run, place)


def metric_name(name: str) -> str:
    """A name that MLflow takes: what it does not allow becomes an underscore."""
    name = _NOT_ALLOWED.sub("_", name)[:240].lstrip("/.") or "_"
    return re.sub(r"/(?=/)|(?<=/)\.+(?=/)|/$", "_", name)


class MlflowRun:
    """One run of MLflow, in the experiment that MLFLOW_EXPERIMENT_NAME says, or `shoal`.

    A run that is sent again, or resumed, stays one: it is found by its tag. MLflow keeps equal numbers once, but for
    those in folders.
    """

    def __init__(self, run: RunInfo, place: str) -> None:
        try:
            from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME, MLFLOW_HTTP_REQUEST_MAX_RETRIES
            from mlflow.tracking import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.WARNING)
            if not MLFLOW_HTTP_REQUEST_MAX_RETRIES.is_set():
                # It would try for minutes before anybody learns that no server is there. We try again, too.
                MLFLOW_HTTP_REQUEST_MAX_RETRIES.set(1)
            self._client: Any = MlflowClient(tracking_uri=place or None)
            experiment = self._experiment(MLFLOW_EXPERIMENT_NAME.get() or "shoal")
            self._id = self._find(experiment, run) or self._create(experiment, run)
        except Exception as error:
            raise UserError(
                f"MLflow does not take this run{f' at {mask(place)}' if place else ''}.",
                why=mask(one_line(error)),
                hint="name a server or a database: `--to mlflow:http://host:5000`, `--to mlflow:sqlite:///mlflow.db`"
                "; or a folder, with MLFLOW_ALLOW_FILE_STORE=true",
            ) from error

    def write(self, rows: Sequence[Scalars]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(tag_of(name)), value, round(1000 * row.time), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + BATCH])

    def event(self, event: Event) -> None:
        from mlflow.entities import Param, RunTag

        if event.kind == "settings":
            known = self._client.get_run(self._id).data.params
            settings = {metric_name(name): str(value) for name, value in plain_settings(event).items()}
            # MLflow never changes one. A run that was resumed with other settings keeps those it began with.
            params = [Param(name, value) for name, value in settings.items() if name not in known]
            self._client.log_batch(self._id, params=params[:100])
        elif event.kind == "alert" and not event.data.get("is_resolved"):
            name = metric_name(f"shoal.alert.{event.data.get('rule')}")
            self._client.log_batch(self._id, tags=[RunTag(name, str(event.data.get("message"))[:500])])

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known is not None else self._client.create_experiment(name))

    def _find(self, experiment: str, run: RunInfo) -> str | None:
        path = run.path.replace("'", "\\'")
        found = self._client.search_runs([experiment], filter_string=f"tags.`shoal.path` = '{path}'", max_results=1)
        if not found:
            return None
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)

    def _create(self, experiment: str, run: RunInfo) -> str:
        tags = {"shoal.path": run.path, "shoal.run": run.name, "shoal.command": run.command[:4000]}
        made = self._client.create_run(experiment, start_time=round(1000 * run.created), run_name=run.name, tags=tags)
        return str(made.info.run_id)
