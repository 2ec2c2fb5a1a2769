"""Questions to Ray's head, each in a process of its own: `python -m shoal.cluster.ask_ray VERB ADDRESS [BUNDLES]`.

Ray reads its environment when it is imported, once, and its client may wait longer than we want to. So whoever asks
starts this with the right environment and a time limit, and reads one line of JSON.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from shoal.cluster.leaving import leave_soon
from shoal.cluster.reach import connect
from shoal.engine.clusters import Cluster
from shoal.engine.env import has_ray_token, inherited_env
from shoal.spec.errors import ShoalError

ANSWER_SECONDS = 40.0
_CONNECT_SECONDS = 5.0
_RAY_SECONDS = 10
_TELL_SECONDS = 20.0


def ask_ray(cluster: Cluster, verb: str) -> list[dict[str, Any]]:
    """Ask the head of our cluster; raises ShoalError where it does not answer."""
    ended = f"`shoal up --cluster` on {cluster.head} starts it again; or `shoal leave` the cluster that is no more"
    return _ask(cluster.address, [verb], inherited_env() | cluster.env, ended)


def ask_other(address: str, bundles: Sequence[Mapping[str, float]] | None) -> list[dict[str, Any]]:
    """The nodes of a cluster that others began. With `bundles`, its autoscaler is told first what is to fit on it.

    Ray keeps one such request for the whole cluster, the last one, until there is another; an empty one is none.
    """
    env = inherited_env()
    if has_ray_token():  # what `ray start` does by itself
        env.setdefault("RAY_AUTH_MODE", "token")
    told = [] if bundles is None else [json.dumps([dict(each) for each in bundles])]
    return _ask(address, ["nodes", *told], env, "start it, or correct `ray` in service.toml")


def _ask(address: str, words: Sequence[str], env: Mapping[str, str], otherwise: str) -> list[dict[str, Any]]:
    # Ray itself would go on trying for a long time.
    head, _, port = address.rpartition(":")
    connect(head, int(port), _CONNECT_SECONDS, otherwise).close()
    verb, *more = words
    command = [sys.executable, "-m", "shoal.cluster.ask_ray", verb, address, *more]
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=True,
        )
        return list(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        why = f"no answer within {ANSWER_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        why = str(error.stderr).strip().rpartition("\n")[2][:300]
    except (ValueError, IndexError):
        why = "its answer is not what this version of Ray should give"
    raise ShoalError(
        f"Ray's head at {address} does not answer.",
        why=why,
        hint=f"see whether {head} is on, and whether `shoal nodes` works there",
    )


def nodes(address: str, bundles: str = "") -> list[dict[str, Any]]:
    """Every machine that Ray knows, those that are gone too, with what it has and what of that is free.

    Its autoscaler is asked for `bundles` first, where they are given.
    """
    client = _client(address)
    if bundles:
        _request(client, address, json.loads(bundles))
    found = client.get_all_node_info(timeout=_RAY_SECONDS)
    status = import_module("ray.autoscaler.v2.sdk").get_cluster_status(address, timeout=_RAY_SECONDS)
    free = {node.node_id: node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)}
    return [_node(info, free.get(info.node_id.hex(), {})) for info in found.values()]


def _node(info: Any, free: dict[str, float]) -> dict[str, Any]:
    total = dict(info.resources_total)
    return {
        "id": info.node_id.hex(),
        "name": info.node_name,
        "host": info.node_manager_hostname,
        "address": info.node_manager_address,
        "is_head": info.is_head_node,
        "is_alive": info.state == 0,
        "has_left": info.death_info.reason == 1,
        "started": info.start_time_ms / 1e3,
        "group": info.node_type_name,
        "cores": total.get("CPU", 0.0),
        "gpus": total.get("GPU", 0.0),
        "memory_bytes": int(total.get("memory", 0)),
        "free_cores": free.get("CPU", 0.0),
        "free_gpus": free.get("GPU", 0.0),
        "free_memory_bytes": int(free.get("memory", 0)),
        "labels": {key: value for key, value in info.labels.items() if not key.startswith("ray.io/node-")},
    }


def _request(client: Any, address: str, bundles: list[dict[str, float]]) -> None:
    """What `ray.autoscaler.sdk.request_resources` does. That needs a driver, whose node would count as in use."""
    if import_module("ray.autoscaler.v2.utils").is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
        requests = [{"resources": bundle, "label_selector": {}} for bundle in bundles]
        import_module("ray.autoscaler.v2.sdk").request_cluster_resources(address, requests, timeout=_RAY_SECONDS)
        return
    key = import_module("ray._private.ray_constants").AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    client.internal_kv_put(key, json.dumps(bundles).encode(), True, None, timeout=_RAY_SECONDS)


def end_others(address: str) -> list[dict[str, Any]]:
    """Have every machine but the first leave; returns those that could not be told."""
    ray, scheduling = import_module("ray"), import_module("ray.util.scheduling_strategies")
    others = [node for node in nodes(address) if node["is_alive"] and not node["is_head"]]
    if not others:
        return []
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    leaving = ray.remote(num_cpus=0, max_retries=0)(leave_soon)
    told = {}
    for node in others:
        there = scheduling.NodeAffinitySchedulingStrategy(node["id"], soft=False)
        told[leaving.options(scheduling_strategy=there).remote(address)] = node
    done, waiting = ray.wait(list(told), num_returns=len(told), timeout=_TELL_SECONDS)
    return [told[each] for each in (*waiting, *filter(_has_failed, done))]


def _has_failed(result: Any) -> bool:
    try:
        import_module("ray").get(result)
    except Exception:  # Whatever Ray makes of it, that machine has not been told.
        return True
    return False


def _client(address: str) -> Any:
    """What Ray's own command line asks its head with. It carries no types."""
    return import_module("ray._raylet").GcsClient(address=address)


if __name__ == "__main__":
    print(json.dumps({"nodes": nodes, "end_others": end_others}[sys.argv[1]](*sys.argv[2:])))
