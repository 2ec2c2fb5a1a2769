"""Numbers of a run in Weights & Biases. WANDB_MODE=offline keeps them in the run folder, for `wandb sync`."""

import hashlib
from collections.abc import Sequence
from typing import Any

from shoal.observe.clean import one_line
from shoal.observe.exporters.settings import plain_settings
from shoal.observe.runs import RunInfo
from shoal.observe.scalars import Scalars, tag_of
from shoal.spec.errors import UserError
from shoal.spec.event import Event


def open_exporter(run: RunInfo, place: str) -> "WandbRun":
    return WandbRun(run, place)


def run_id(run: RunInfo) -> str:
    """The same for the same run folder, whoever sends it: a run that is resumed, or sent again, stays one run."""
    return hashlib.sha256(f"{run.host}:{run.path}".encode()).hexdigest()[:12]


class WandbRun:
    """One run of wandb. Steps are a number of their own: wandb's count only goes up, and drops what is late."""

    def __init__(self, run: RunInfo, place: str) -> None:
        import wandb

        entity, _, project = place.rpartition("/")
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=60,
        )
        try:
            self._run: Any = wandb.init(
                project=project or "shoal",
                entity=entity or None,
                id=run_id(run),
                name=run.name,
                dir=run.path,
                config={"command": run.command, "num_workers": run.num_workers},
                resume="allow",
                settings=settings,
            )
        except Exception as error:
            raise UserError(
                "Weights & Biases does not take this run.",
                why=one_line(error),
                hint="`wandb login`, or set WANDB_MODE=offline: it is then kept in the run folder, for `wandb sync`",
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: Sequence[Scalars]) -> None:
        for row in rows:
            values = {tag_of(name): value for name, value in row.values.items()}
            self._run.log({**values, "step": row.step, "time": row.time})

    def event(self, event: Event) -> None:
        if event.kind == "settings":
            self._run.config.update(plain_settings(event), allow_val_change=True)
        elif event.kind == "alert" and not event.data.get("is_resolved"):
            data = event.data
            text = "\n".join(str(data[name]) for name in ("message", "why", "hint") if data.get(name))
            self._run.alert(title=f"shoal: {data.get('rule', 'alert')}", text=text)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "running", "imported") else 1)
        # Ends the process of wandb that writes; only then is everything in the file.
        import wandb

        wandb.teardown()
