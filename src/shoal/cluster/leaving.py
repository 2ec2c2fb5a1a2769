"""Takes a machine out of a cluster that is being ended elsewhere: `python -m shoal.cluster.leaving ADDRESS`.

`shoal down` has Ray call `leave_soon` on every machine but the first. A worker cannot end Ray and live to tell,
so it starts this, which is nobody's child: Ray ends the children of its workers.
"""

import os
import subprocess
import sys
import time

from shoal.cluster import ray_node
from shoal.cluster.files import forget
from shoal.engine.clusters import MEMBER, cluster_folder, read_cluster

# Until Ray has carried the answer home.
_ANSWER_SECONDS = 1.0


def leave_soon(address: str) -> None:
    """Have this machine leave the cluster whose head is at an address; returns before it does."""
    subprocess.run(
        [sys.executable, "-m", "shoal.cluster.leaving", address],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )


def main(address: str) -> None:
    if os.fork():
        return
    time.sleep(_ANSWER_SECONDS)
    cluster = read_cluster(cluster_folder())
    if cluster is not None and cluster.role == MEMBER and cluster.address == address:
        ray_node.stop(cluster, lambda _: None)
        forget(cluster)


if __name__ == "__main__":
    main(sys.argv[1])
