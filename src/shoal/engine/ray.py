"""Agents as actors of a Ray cluster: one for each worker, in placement groups."""

import contextlib
import gc
import json
import os
import socket
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.agent import serve
from shoal.engine.clusters import find_cluster
from shoal.engine.env import has_ray_tls, has_ray_token, leave_ray, set_all, set_defaults
from shoal.engine.fit import parse_bytes
from shoal.engine.greeting import GRPC, Greeting, greet
from shoal.engine.grounds import amount
from shoal.engine.machine import route_to
from shoal.engine.wire import Invitation
from shoal.spec.amounts import gib
from shoal.spec.errors import UserError

PROBE_SECONDS = 5.0
END_SECONDS = 2.0
GROWTH_SECONDS = 2.0
"""How often a cluster that is to grow is looked at."""
GROWTH_PATIENCE_SECONDS = 600.0
"""How long a cluster that grows by itself gets where nobody said."""
STATUS_KEY, ALONE = "__autoscaling_status", "node_"
"""Where Ray's autoscaler writes down how it goes, and what the types of nodes begin with that it did not start."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LATE_SECONDS = 7.0
"""When it is said what may keep an agent from coming, though Ray has a place for it."""
COPIES = "working_dir_files"
ON_NODE = 0.001
"""Of what each machine has one of, named after its address: whoever asks for some of it is put on that machine."""

PLACEMENTS = {"pack": "PACK", "spread": "SPREAD", "strict-pack": "STRICT_PACK", "strict-spread": "STRICT_SPREAD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What each worker needs of its machine, and how workers are to lie: `placement` is one of `PLACEMENTS`.

    `labels` are those of nodes, which must all fit. `nodes`, where it is given, are the machines to use, by name or
    address, and how many workers are to be on each: then those decide, and `placement` does not. `wait_seconds`: how
    long a cluster that grows by itself may take to get the machines that it does not have; None: nobody said.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    nodes: Mapping[str, int] = field(default_factory=dict)
    placement: str = "pack"
    wait_seconds: float | None = None

    @property
    def bundle(self) -> dict[str, float]:
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


def read_request(options: Mapping[str, str]) -> Request:
    """What the options `engine.*` ask of Ray. Raises UserError where they make no sense."""
    placement = options.get("engine.placement", "pack")
    if placement not in PLACEMENTS:
        raise UserError(
            f"engine.placement is {placement!r}.", hint=f"use one of: {', '.join(PLACEMENTS)}; pack is the default"
        )
    return Request(
        cpus=amount(options.get("engine.cpus", "1"), "engine.cpus"),
        gpus=amount(options.get("engine.gpus", "0"), "engine.gpus"),
        memory_bytes=parse_bytes(options.get("engine.memory", "0")),
        resources={
            name: amount(value, "engine.resources")
            for name, value in _pairs(options.get("engine.resources", ""), "engine.resources", "disk=1")
        },
        labels=dict(_pairs(options.get("engine.labels", ""), "engine.labels", "zone=a")),
        nodes=_read_nodes(options.get("engine.nodes", "")),
        placement=placement,
        wait_seconds=amount(options["engine.wait"], "engine.wait") if "engine.wait" in options else None,
    )


def _read_nodes(text: str) -> dict[str, int]:
    found = {}
    for name, count in _pairs(text, "engine.nodes", "anna=2,bert=1"):
        if not (count.isascii() and count.isdecimal() and int(count) > 0) or name in found:
            raise UserError(
                f"engine.nodes is {text!r}.",
                why="it names each machine once, with the number of workers there",
                hint="for example: `anna=2,bert=1`",
            )
        found[name] = int(count)
    return found


def _pairs(text: str, name: str, example: str) -> list[tuple[str, str]]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not key or not sign for key, sign, _ in pairs):
        raise UserError(f"{name} is {text!r}.", why="it is a list of NAME=VALUE", hint=f"for example: `{example}`")
    return [(key, value) for key, _, value in pairs]


def make_ground(address: str | None, options: Mapping[str, str]) -> "RayGround":
    """The Ray cluster at this address; without one, that which this process is connected to, or this machine is in.

    `local` starts one on this machine that ends with us.
    """
    request = read_request(options)
    ray, is_ours = connect(address)
    return RayGround(ray, request, is_ours=is_ours)


def connect(address: str | None) -> tuple[Any, bool]:
    """Ray, connected to the cluster at this address, as `make_ground` says; and whether it was not before."""
    cluster = find_cluster() if address is None else None
    more: dict[str, str] = {}
    if cluster is not None and "ray" not in sys.modules:
        set_all(cluster.env)
        # A machine may have several networks, and only one of them is the cluster's.
        address, more = cluster.address, {"_node_ip_address": cluster.node_address}
    ray = import_ray()
    if ray.is_initialized():
        return ray, False
    _connect(ray, address, more)
    return ray, True


def import_ray() -> Any:
    """Ray, with what it says about itself kept down, and its secret used where there is one."""
    quiet = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Seconds that it tries to reach a cluster that refuses it.
        "RAY_NUM_REDIS_GET_RETRIES": "6",
    }
    # What `ray start` does by itself where there is a token; a driver that names an address does not.
    set_defaults(quiet | ({"RAY_AUTH_MODE": "token"} if has_ray_token() else {}))
    is_collecting = gc.isenabled()
    gc.disable()  # a tenth of the time would go into looking for garbage among what is imported
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed.", hint="run `pip install 'shoal[ray]'`") from None
    finally:
        if is_collecting:
            gc.enable()
    return ray


def _connect(ray: Any, address: str | None, more: Mapping[str, str]) -> None:
    try:
        # As Ray finds it: by RAY_ADDRESS, or by what was started here last. Either may be gone, or be others' alone.
        if address in (None, "auto"):
            address = ray._private.services.get_ray_address_from_environment("auto", None)
        if address is not None and address != "local":
            probe(address, greeting=GRPC)
        ray.init(address, log_to_driver=False, logging_level="ERROR", namespace="shoal", **more)
    except ConnectionError as error:
        raise no_cluster(address, str(error)) from error
    except (RuntimeError, ValueError) as error:
        raise _refused(address, str(error)) from error


def probe(address: str, usual_port: int = 10001, *, greeting: Greeting | None = None) -> None:
    """Raise UserError unless somebody listens there, and answers a greeting: Ray itself would try for minutes."""
    place = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    try:
        host, port = place.hostname or "", place.port or usual_port
    except ValueError:
        raise UserError(f"--address {address!r} is not HOST:PORT.", hint="for example: `10.0.0.1:6379`") from None
    try:
        if greeting is None:
            socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
        elif wrong := greet(host, port, greeting, may_be_tls=has_ray_tls()):
            raise no_cluster(address, f"{host}, port {port}: {wrong}")
    except OSError as error:
        raise no_cluster(address, f"{host}, port {port}: {error.strerror or error}") from error


def no_cluster(address: str | None, why: str) -> UserError:
    """What to say where no cluster is, or none that lets us in."""
    return UserError(
        f"There is no Ray cluster at {address} for us." if address else "This machine is in no Ray cluster.",
        why=why.strip().splitlines()[0] if why.strip() else "",
        hint="start one with `shoal up --cluster`, name one with `--address HOST:PORT`, or try one on this machine "
        "alone with `--address local`; if it wants a token, RAY_AUTH_TOKEN_PATH says where that is",
    )


def _refused(address: str | None, why: str) -> UserError:
    line = next((line for line in why.splitlines() if "ersion" in line), why.strip().splitlines()[0] if why else "")
    is_version = "ersion mismatch" in why
    return UserError(
        f"The Ray cluster{f' at {address}' if address else ''} cannot be used from here.",
        why=" ".join(why.split())[:400] if is_version else line,
        hint="install the same Ray and Python on both sides"
        if is_version
        else "run this on a machine of the cluster, or use its client address `ray://HOST:10001`",
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """One agent to be: its place in a placement group, and the call that it is in.

    `node` is the address of the machine where it must be; empty where Ray may choose.
    """

    number: int
    group: Any
    index: int = 0
    node: str = ""
    is_given_up: bool = False
    actor: Any = None
    call: Any = None
    due: float = 0.0
    pause: float = FIRST_PAUSE


class RayGround:
    """One group for the workers that are needed, which start together or not at all; one for each that may join.

    Where it was said which machines to use, somebody keeps them free for us, and each worker has a group of its own,
    on its machine: so each can be given back alone.

    Ray restarts nothing of this: an agent that ends is started again when the launcher asks for it, where Ray has put
    its place by then.
    """

    def __init__(self, ray: Any, request: Request, *, is_ours: bool) -> None:
        self._ray, self._request, self._is_ours = ray, request, is_ours
        self.host = _own_address(ray)
        self._slots: list[_Slot] = []
        self._groups: list[Any] = []
        self._invitation: Invitation | None = None
        self._least = 0
        self._grow_until: float | None = None
        self._look_due = 0.0
        self._waits_since: dict[bool, float] = {}
        self._shipped = shipped_folder(_here())

    def open(self, invitation: Invitation, num_slots: int, least: int) -> int:
        self._invitation, self._least = invitation, least
        if self._request.nodes:
            self._check_nodes(self._request.nodes, least)
            for address in self._addresses(self._request.nodes).elements():
                self._add(self._new_group(1, address), node=address)
            return len(self._slots)
        if wait_seconds := patience(self._ray, self._request):
            self._ask_for_machines(num_slots)
            self._grow_until = time.monotonic() + wait_seconds
        else:
            check_room(self._ray, self._request, least)
        together = self._new_group(least)
        for index in range(least):
            self._add(together, index)
        for _ in range(num_slots - least):
            self._add(self._new_group(1))
        return num_slots

    def _add(self, group: Any, index: int = 0, node: str = "") -> None:
        self._slots.append(_Slot(number=len(self._slots), group=group, index=index, node=node))
        self._start(self._slots[-1])

    def _check_nodes(self, nodes: Mapping[str, int], least: int) -> None:
        """Raise UserError where these could never have so many workers. A machine that is gone may come back."""
        known = [name for node in self._ray.nodes() for name in (node["NodeName"], node["NodeManagerAddress"])]
        if unknown := [name for name in nodes if name not in known]:
            raise UserError(
                f"There is no machine {unknown[0]!r} in the Ray cluster.",
                why=f"there are: {', '.join(sorted(set(known)))}",
                hint="`shoal nodes` shows them; engine.nodes has names or addresses",
            )
        if sum(nodes.values()) < least:
            raise UserError(
                f"engine.nodes has places for {sum(nodes.values())} workers, and {least} are needed.",
                hint="use `-n` with fewer, or name more machines",
            )

    def _addresses(self, nodes: Mapping[str, int]) -> Counter[str]:
        """The same by address. A name that Ray does not know is taken for one: its machine may come yet."""
        addresses = {node["NodeName"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        found: Counter[str] = Counter()
        for name, count in nodes.items():
            found[addresses.get(name, name)] += count
        return found

    def arrange(self, nodes: Mapping[str, int], used: Collection[str]) -> set[str]:
        if not self._request.nodes:
            raise UserError(
                "This run cannot be told which machines to use.",
                why="Ray chooses them, for it began without engine.nodes",
                hint="begin it with `-o engine.nodes=NAME=2`",
            )
        spare: set[str] = set()
        missing = self._addresses(nodes)
        kept = [slot for slot in self._slots if not slot.is_given_up]
        for slot in sorted(kept, key=lambda slot: (str(slot.number) not in used, slot.number)):
            if missing[slot.node] > 0:
                missing[slot.node] -= 1
            else:
                spare.add(str(slot.number))
        for address in missing.elements():
            self._add(self._new_group(1, address), node=address)
        return spare

    def give_up(self, agent: str) -> None:
        slot = self._slots[int(agent)]
        self._kill(slot)
        slot.is_given_up, slot.due = True, 0.0
        self._remove_group(slot)

    def look(self) -> Sequence[UserError]:
        now, kept_away = time.monotonic(), []
        calls = {slot.call: slot for slot in self._slots if slot.call is not None}
        ended, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        for call in ended:
            slot = calls[call]
            why = self._why_ended(slot)
            slot.call = None
            if why is not None and slot.number < self._least:
                raise why
            if why is not None:
                kept_away.append(why)
            self._later(slot)  # also of one that Ray put on a machine which was gone: nobody has heard of it
        for slot in self._slots:
            if slot.call is None and slot.due and now >= slot.due:
                self._start(slot)
        if self._grow_until is not None and now > self._look_due:
            self._look_due = now + GROWTH_SECONDS
            self._see_to_growth(now > self._grow_until)
        return kept_away

    def _see_to_growth(self, is_late: bool) -> None:
        """Withdraw what was asked for when all have their places, or in the end: what is in use is not taken away.

        Ray keeps one such request for the whole cluster, for ever: one that outlives its run keeps machines running.
        """
        if is_late or all(group.wait(0) for group in self._groups):
            self._grow_until = None
            self._ask_for_machines(0)
        if is_late:
            check_room(self._ray, self._request, self._least)

    def replace(self, agent: str) -> None:
        slot = self._slots[int(agent)]
        self._kill(slot)
        if slot.node or slot.number >= self._least:
            # Ray moves places of a machine that is gone once it is sure of that, which takes it some 15 s.
            self._remove_group(slot)
            with contextlib.suppress(Exception):  # a cluster that is gone has no places at all
                slot.group = self._new_group(1, slot.node)
        self._later(slot)

    def _remove_group(self, slot: _Slot) -> None:
        with contextlib.suppress(Exception):  # a cluster that is gone needs no giving back
            self._groups.remove(slot.group)
            self._ray.util.remove_placement_group(slot.group)

    def _later(self, slot: _Slot) -> None:
        if slot.due:
            return
        slot.due = time.monotonic() + slot.pause
        slot.pause = min(LONGEST_PAUSE, 2 * slot.pause)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a cluster that is gone needs no giving back
            calls = [slot.call for slot in self._slots if slot.call is not None]
            if calls:
                self._ray.wait(calls, num_returns=len(calls), timeout=END_SECONDS)
            for slot in self._slots:
                self._kill(slot)
            for group in self._groups:
                self._ray.util.remove_placement_group(group)
            if self._grow_until is not None:
                self._ask_for_machines(0)
        self._slots, self._groups = [], []
        if self._is_ours:
            self._ray.shutdown()

    def _new_group(self, count: int, node: str = "") -> Any:
        there = {f"node:{node}": ON_NODE} if node else {}
        labels = [dict(self._request.labels)] * count if self._request.labels else None
        group = self._ray.util.placement_group(
            [{**self._request.bundle, **there}] * count,
            strategy=PLACEMENTS[self._request.placement],
            bundle_label_selector=labels,
        )
        self._groups.append(group)
        return group

    def _start(self, slot: _Slot) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.group, placement_group_bundle_index=slot.index
        )
        options = {
            "num_cpus": self._request.cpus,
            "num_gpus": self._request.gpus,
            "memory": self._request.memory_bytes or None,
            "resources": dict(self._request.resources),
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        slot.actor = self._ray.remote(RayAgent).options(**options).remote()
        slot.call = slot.actor.serve.remote(self._invitation, str(slot.number), self._shipped)
        slot.due = 0.0

    def _kill(self, slot: _Slot) -> None:
        if slot.actor is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(slot.actor, no_restart=True)
        slot.actor = slot.call = None

    def _why_ended(self, slot: _Slot) -> UserError | None:
        """Why an agent could not work; None where it ended in an ordinary way, or with its machine."""
        errors = self._ray.exceptions
        try:
            self._ray.get(slot.call)
        except (errors.RayActorError, errors.RaySystemError, errors.NodeDiedError) as error:
            return _cannot_import(str(error)) if "ModuleNotFoundError" in str(error) else None
        except Exception as error:
            cause = getattr(error, "cause", error)
            return cause if isinstance(cause, UserError) else _cannot_import(str(error))
        return None

    def _address_of(self, slot: _Slot) -> str:
        """The machine on which Ray has put its place."""
        placed = self._ray.util.placement_group_table(slot.group)["bundles_to_node_id"].get(slot.index)
        found = (node["NodeManagerAddress"] for node in self._ray.nodes() if node["NodeID"] == placed)
        return next(found, "a machine that is gone")

    def _ask_for_machines(self, count: int) -> None:
        """Let a cluster that grows by itself know at once how many there will be; with 0, that none are needed."""
        from ray.autoscaler.sdk import request_resources

        labels = [dict(self._request.labels)] * count if self._request.labels else None
        request_resources(bundles=[self._request.bundle] * count, bundle_label_selectors=labels)

    def waiting_for(self, present: Collection[str]) -> str:
        missing = [slot for slot in self._slots if str(slot.number) not in present and not slot.is_given_up]
        is_placed = all(group.wait(0) for group in self._groups)
        seconds = time.monotonic() - self._waits_since.setdefault(is_placed, time.monotonic())
        head = self._ray.get_runtime_context().gcs_address
        if is_placed:
            told = f"agents are starting on {', '.join(sorted(set(map(self._address_of, missing))))}"
            if seconds < LATE_SECONDS:
                return told
            why = f"they are slow, or a firewall keeps Ray's processes there from those of {head}, Ray's head"
            return f"{told} for {seconds:.0f} s: {why}"
        free = self._ray.available_resources()
        told = f"each worker needs {_tell(self._request.bundle)}; free in the cluster: {_tell(free) or 'nothing'}"
        has_room = all(free.get(name, 0.0) >= each * len(missing) for name, each in self._request.bundle.items())
        if has_room and seconds > LATE_SECONDS:
            why = f"machines have too little each, or a firewall is between one of them and {head}, Ray's head"
            told = f"{told}. Ray gives them no places, for {seconds:.0f} s: {why}"
        if self._grow_until is None:
            return told
        left = max(0.0, self._grow_until - time.monotonic())
        return f"{told}. The cluster was asked to grow, and gets {left:.0f} s more (`-o engine.wait=SECONDS`)"


class RayAgent:
    """What runs on a node of the cluster."""

    def serve(self, invitation: Invitation, name: str, shipped: str | None) -> str:
        """`shipped` is the launcher's folder, where Ray has copied that to all machines: it is where we are now."""
        ray = import_ray()
        leave_ray()
        moved = None if shipped is None else (shipped, os.getcwd())
        return serve(invitation, name, str(ray.util.get_node_ip_address()), 1, moved=moved)


def check_room(ray: Any, request: Request, least: int) -> None:
    """Raise UserError where the machines of a cluster, all of them free, could not take so many workers."""
    nodes = [
        {"name": node["NodeManagerAddress"], "total": node["Resources"], "labels": node.get("Labels") or {}}
        for node in ray.nodes()
        if node["Alive"]
    ]
    fitting = count_fitting(nodes, request)
    if fitting < least:
        has = ", ".join(f"{node['name']}: {_tell(node['total'])}" for node in nodes) or "no machine"
        raise UserError(
            f"The Ray cluster has room for {fitting} workers, and {least} are needed.",
            why=f"each needs {_tell(request.bundle)}{_tell_labels(request.labels)}; there is {has}",
            hint="use `-n` with fewer, ask less for each (`-o engine.cpus=0.5`), or add machines. A cluster that "
            "grows by itself gets time with `-o engine.wait=600`",
        )


def patience(ray: Any, request: Request) -> float:
    """How long machines are waited for that are not there yet: as was said, or where the cluster grows by itself."""
    if request.wait_seconds is not None:
        return request.wait_seconds
    return GROWTH_PATIENCE_SECONDS if does_grow(ray) else 0.0


def does_grow(ray: Any) -> bool:
    """Whether Ray's autoscaler adds machines to the cluster. It runs in others, too, and only looks on there."""
    text = ray.experimental.internal_kv._internal_kv_get(STATUS_KEY)
    return has_node_types(json.loads(text)) if text else False


def has_node_types(status: Mapping[str, Any]) -> bool:
    """Whether an autoscaler that reports this starts nodes: of a type, then, and not each of its own. Pure."""
    report = status.get("autoscaler_report") or {}
    kinds = [*report.get("active_nodes", ()), *(report.get("idle_nodes") or ()), *report.get("pending_launches", ())]
    kinds += [kind for _, kind, *_ in report.get("pending_nodes", ())]
    kinds += (report.get("node_type_mapping") or {}).values()  # also of nodes that are not at work yet
    return any(not kind.startswith(ALONE) for kind in kinds)


def count_fitting(nodes: Sequence[Mapping[str, Any]], request: Request) -> int:
    """How many workers the cluster could have if nobody else used it. Pure."""
    fits = [
        min((int(node["total"].get(name, 0.0) / amount + 1e-9) for name, amount in request.bundle.items()), default=0)
        for node in nodes
        if all(node["labels"].get(name) == value for name, value in request.labels.items())
    ]
    match request.placement:
        case "strict-spread":
            return sum(fit > 0 for fit in fits)
        case "strict-pack":
            return max(fits, default=0)
    return sum(fits)


def _tell(resources: Mapping[str, float]) -> str:
    parts = [
        f"{gib(amount)} of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if _is_telling(name)
    ]
    return ", ".join(parts)


def _is_telling(name: str) -> bool:
    """Ray counts more than people want to know: an own resource for each node and each placement group."""
    return not name.startswith("node:") and "_group_" not in name and name not in ("object_store_memory", "bundle")


def _tell_labels(labels: Mapping[str, str]) -> str:
    return f" on a machine with {', '.join(f'{k}={v}' for k, v in labels.items())}" if labels else ""


def _cannot_import(why: str) -> UserError:
    missing = next((line for line in why.splitlines() if "ModuleNotFoundError" in line), "")
    return UserError(
        "An agent could not be started on a machine of the Ray cluster.",
        why=missing.strip() or " ".join(why.split())[:300],
        hint="install the same shoal on all machines of the cluster",
    )


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UserError("The folder of this run does not exist any more.", hint="start it in one that does") from None


def shipped_folder(folder: str) -> str | None:
    """The copy of a user's folder that this one lies in, if Ray made one for a job that was submitted. Pure.

    It makes a copy on every machine, below a folder of its own there.
    """
    above, found, rest = folder.partition(f"{os.sep}{COPIES}{os.sep}")
    return above + found + rest.partition(os.sep)[0] if found else None


def _own_address(ray: Any) -> str:
    """Where the machines of the cluster reach this one."""
    if ray.util.client.ray.is_connected():
        address = ray.util.client.ray.get_context().client_worker._conn_str
        return route_to(urllib.parse.urlsplit(f"//{address}").hostname or "")
    return str(ray.util.get_node_ip_address())
