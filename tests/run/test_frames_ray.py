"""Real Datasets of Ray Data become shards. Ray runs in a process of its own, with a folder of its own."""

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import frames_training
import numpy as np
import pytest
from frames_training import NUM_ROWS

from shoal.data import frames
from shoal.data.sources import as_source

pytest.importorskip("ray.data")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
    import json, sys
    import numpy as np
    import pandas
    import ray
    from shoal.data import frames
    from shoal.spec.errors import UserError

    temp, dir = sys.argv[1:]
    # Its own address: others on this machine may have a Ray, too.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def refused(dataset, **how):
        try:
            frames.from_ray(dataset, **how)
        except UserError as error:
            assert error.why and error.hint
            return error.message
        raise AssertionError("nothing was said")

    number = np.arange({num_rows})
    rows = ray.data.from_pandas(pandas.DataFrame(
        dict(id=number, x=number * 0.25, y=(number % 7).astype("f4"), label=number % 2)
    )).repartition(5).map_batches(lambda batch: batch)
    tensors = ray.data.from_numpy(np.arange(24, dtype="f4").reshape(4, 2, 3)).repartition(2)
    try:
        told = dict(
            rows=frames.from_ray(rows, dir=dir).folder,
            tensors=frames.from_ray(tensors, dir=dir).folder,
            order=rows.context.execution_options.preserve_order,
            missing=refused(rows, columns=["z"], dir=dir),
            empty=refused(rows.filter(lambda row: row["id"] < 0), dir=dir),
            frame=refused([1], dir=dir),
            holes=refused(ray.data.from_items([dict(a=1), dict(a=None)]).repartition(1), dir=dir),
            broken=refused(rows.map_batches(lambda batch: 1 / 0), dir=dir),
        )
        print("TOLD", json.dumps(told), flush=True)
    finally:
        ray.shutdown()
"""


def test_datasets_become_shards(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{num_rows}", str(NUM_ROWS)))
    with tempfile.TemporaryDirectory(prefix="ray-") as temp:  # sockets need a short path
        command = [sys.executable, "-W", "ignore", str(script), temp, str(tmp_path / "rows")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    told: dict[str, Any] = json.loads(line.removeprefix("TOLD"))
    check(told, tmp_path)


def check(told: dict[str, Any], tmp_path: Path) -> None:
    """Ray is gone by now."""
    shards = frames.open_shards(told["rows"])
    assert len(shards.shards) == 5
    frames_training.check_sameness(shards, tmp_path)
    batch = as_source(frames.open_shards(told["tensors"])).fetch(np.array([3]))
    assert batch["data"].tolist() == np.arange(18, 24).reshape(1, 2, 3).tolist()
    assert told["order"] is False
    assert told["missing"] == "There is no column 'z'."
    assert "is empty" in told["empty"]
    assert "is not a Dataset of Ray Data" in told["frame"]
    assert "A value is missing in column 'a'" in told["holes"]
    assert told["broken"] == "Ray could not write the rows."
