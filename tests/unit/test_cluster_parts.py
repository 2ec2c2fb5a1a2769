"""What a machine knows about its cluster: state, versions, names, ports, and the list of machines."""

import json
import os
import stat
from dataclasses import replace

import pytest

from shoal.cluster import head, ray_node, verbs
from shoal.cluster.files import forget, locked, read_private, write_cluster
from shoal.cluster.listing import current_nodes, plain, table
from shoal.cluster.member import clock_warning
from shoal.cluster.naming import check_name, host_name, join_labels, parse_host, parse_port
from shoal.cluster.ports import NUM_PORTS, Ports
from shoal.cluster.versions import check_versions, differing, versions_here
from shoal.engine.clusters import (
    HEAD,
    MEMBER,
    Cluster,
    boot_id,
    cluster_folder,
    find_cluster,
    is_running,
    processes_of,
    read_cluster,
)
from shoal.spec.errors import UserError

VERSIONS = {"python": "3.11.7", "shoal": "0.3.0", "ray": "2.60.0", "torch": "2.13.0+cpu"}


@pytest.fixture
def cluster(home, tmp_path):
    os.makedirs(cluster_folder(), mode=0o700)
    return Cluster(
        name="anna",
        role=MEMBER,
        address="10.0.0.1:7481",
        node_address="10.0.0.2",
        port=7480,
        has_tls=True,
        folder=cluster_folder(),
        temp_dir=str(tmp_path / "ray"),
    )


def test_a_machine_in_no_cluster_finds_none(home):
    assert find_cluster() is None
    assert not (home / "cluster").exists()


def test_what_is_written_down_is_read_again(cluster):
    cluster = replace(cluster, labels="room=attic", session=7, boot="b")
    write_cluster(cluster)
    assert read_cluster(cluster.folder) == cluster
    assert stat.S_IMODE(os.stat(cluster.path("cluster.json")).st_mode) == 0o600


def test_a_folder_that_was_moved_is_where_it_is_now(cluster, tmp_path):
    write_cluster(cluster)
    os.rename(cluster.folder, tmp_path / "moved")
    moved = read_cluster(str(tmp_path / "moved"))
    assert moved is not None
    assert moved.folder == str(tmp_path / "moved")


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"name": 1}', json.dumps({"surprise": 1})])
def test_damaged_state_is_told(cluster, damage):
    with open(cluster.path("cluster.json"), "w") as file:
        file.write(damage)
    with pytest.raises(UserError, match="cannot be read"):
        find_cluster()


@pytest.mark.parametrize(
    ("role", "again", "ended"),
    [(HEAD, "shoal up --cluster", "shoal down"), (MEMBER, "shoal join 10.0.0.1", "shoal leave")],
)
def test_a_cluster_that_does_not_run_here_is_told(cluster, role, again, ended):
    write_cluster(replace(cluster, role=role))
    with pytest.raises(UserError, match="Ray does not run here") as told:
        find_cluster()
    assert again in told.value.hint
    assert ended in told.value.hint


def test_ray_is_told_of_token_and_certificates(cluster):
    env = cluster.env
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN"] == ""
    assert env["RAY_AUTH_TOKEN_PATH"] == os.path.join(cluster.folder, "token")
    assert env["RAY_USE_TLS"] == "1"
    assert {"RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"} < set(env)
    assert replace(cluster, has_tls=False).env["RAY_USE_TLS"] == "0"
    assert cluster.head == "10.0.0.1"


def test_processes_of_others_are_not_ours(cluster):
    """This very process: in a session that is written down, but nothing about it is Ray's."""
    ours = replace(cluster, session=os.getsid(0), boot=boot_id(), temp_dir="/nowhere/at/all")
    assert os.getpid() not in {process.pid for process in processes_of(ours)}
    assert not is_running(ours)
    assert processes_of(replace(ours, boot="the boot before")) == []
    assert processes_of(replace(ours, session=0)) == []


def test_forgetting_leaves_nothing(cluster):
    write_cluster(cluster)
    os.makedirs(os.path.join(cluster.temp_dir, "session_1"))
    forget(cluster)
    assert not os.path.exists(cluster.folder)
    assert not os.path.exists(cluster.temp_dir)


def test_two_at_a_time_are_told(cluster):
    with (
        locked(cluster.folder, "lock", waits=False),
        pytest.raises(UserError, match="at work on this machine"),
        locked(cluster.folder, "lock", waits=False),
    ):
        pass


def read_all(cluster, names):
    return {name: read_private(cluster.folder, name) for name in names}


def test_secrets_are_made_once(cluster):
    cluster = replace(cluster, role=HEAD, node_address="10.0.0.1")
    head.make_secrets(cluster, is_new=True)
    names = ("token", "ca.pem", "ca.key", "node.pem", "node.key")
    first = read_all(cluster, names)
    assert {stat.S_IMODE(os.stat(cluster.path(name)).st_mode) for name in names} == {0o600}
    head.make_secrets(cluster, is_new=False)
    assert read_all(cluster, names) == first
    head.make_secrets(cluster, is_new=True)
    changed = {name for name, content in read_all(cluster, names).items() if content != first[name]}
    assert changed == {"node.pem", "node.key"}


def test_ports_are_apart_and_few():
    ports = Ports(9000)
    fixed = set(ports.fixed_on_head)
    assert len(fixed) == 10
    assert set(ports.fixed) < fixed
    assert not fixed & set(ports.workers)
    assert max(ports.workers) == 9000 + NUM_PORTS - 1
    assert ports.door == 9000


def test_the_command_that_starts_ray_names_all_ports_and_folders(cluster):
    member = ray_node.start_command(cluster, [7500, 7502])
    assert "--address=10.0.0.1:7481" in member
    assert "--worker-port-list=7500,7502" in member
    assert f"--temp-dir={cluster.temp_dir}" in member
    assert "--head" not in member
    first = ray_node.start_command(replace(cluster, role=HEAD), [7500])
    assert {"--head", "--port=7481", "--include-dashboard=false"} < set(first)


def test_rays_folder_is_short_and_of_this_home():
    assert len(ray_node.temp_dir_for("/home/" + "x" * 200)) < 30
    assert ray_node.temp_dir_for("/a") != ray_node.temp_dir_for("/b")


def test_little_shared_memory_is_told(monkeypatch):
    there = os.statvfs("/dev/shm")
    monkeypatch.setattr(ray_node, "MIN_SHARED_BYTES", there.f_bavail * there.f_frsize + (1 << 40))
    with pytest.raises(UserError, match="MiB left") as told:
        ray_node.check_shared_memory()
    assert "--shm-size" in told.value.hint
    with pytest.raises(UserError, match="There is no /nowhere"):
        ray_node.check_shared_memory("/nowhere")


def test_the_same_versions_go_together():
    assert differing(VERSIONS, VERSIONS) == []
    there = {**VERSIONS, "python": "3.11.2", "torch": "2.13.0+cu130"}
    check_versions(VERSIONS, there, "anna")


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("python", "3.12.1", ["3.11.7 here", "3.12.1 on anna", "Python 3.12"]),
        ("ray", "2.61.0", ["2.60.0 here", "'ray[default]==2.61.0'"]),
        ("torch", "2.12.1+cu130", ["2.13.0+cpu here", "'torch==2.12.1'"]),
        ("torch", "none", ["none on anna", "install on anna what it lacks"]),
        ("shoal", "0.4.0", ["install shoal 0.4.0 here, from where anna has it"]),
    ],
)
def test_other_versions_are_named_on_both_sides(name, version, words):
    with pytest.raises(UserError, match="other versions") as told:
        check_versions(VERSIONS, {**VERSIONS, name: version}, "anna")
    for word in words:
        assert word in told.value.why + told.value.hint


def test_versions_here_are_known():
    assert set(versions_here()) == set(VERSIONS)
    assert versions_here()["torch"] != "none"


def test_clocks_that_differ_are_told():
    assert clock_warning(0.8) == clock_warning(-3) == []
    assert "7.0 s behind" in clock_warning(7)[0]
    assert "60.0 s ahead" in clock_warning(-60)[0]
    with pytest.raises(UserError, match="too far apart"):
        clock_warning(2 * 86400)


def node(address, *, name="x", is_alive=True, has_left=False, started=1.0, is_head=False, free=2.0):
    return {
        "id": f"{address}-{started}",
        "name": name,
        "host": "h",
        "address": address,
        "is_head": is_head,
        "is_alive": is_alive,
        "has_left": has_left,
        "started": started,
        "cores": 2.0,
        "gpus": 0.0,
        "memory_bytes": 1 << 30,
        "free_cores": free,
        "free_gpus": 0.0,
        "free_memory_bytes": 1 << 30,
        "labels": {"room": "attic"},
    }


def test_who_left_is_not_listed_and_who_is_missed_is():
    nodes = current_nodes(
        [
            node("10.0.0.3", name="carl", is_alive=False),
            node("10.0.0.4", name="dora", is_alive=False, has_left=True),
            node("10.0.0.2", name="bert", free=0.5),
            node("10.0.0.1", name="zoe", is_head=True),
        ]
    )
    assert [(each.name, each.is_alive, each.is_busy) for each in nodes] == [
        ("zoe", True, False),
        ("bert", True, True),
        ("carl", False, False),
    ]
    lines = table(nodes).splitlines()
    assert lines[1].split()[:4] == ["zoe", "(head)", "10.0.0.1", "free"]
    assert "0.5 of 2 free" in lines[2]
    assert "gone" in lines[3]
    assert json.loads(json.dumps(plain(nodes[1])))["labels"] == {"room": "attic"}


def test_of_a_machine_that_came_back_only_the_newest_life_counts():
    nodes = current_nodes(
        [
            node("10.0.0.2", started=3.0, is_alive=False, has_left=True),
            node("10.0.0.2", started=1.0, is_alive=False),
            node("10.0.0.3", started=1.0, is_alive=False),
            node("10.0.0.3", started=2.0),
        ]
    )
    assert [(each.address, each.is_alive) for each in nodes] == [("10.0.0.3", True)]


def test_hosts_and_ports_are_parsed():
    assert parse_host("10.0.0.1") == ("10.0.0.1", 7480)
    assert parse_host("anna.local:9000") == ("anna.local", 9000)
    for wrong in ("", ":7480", "::1", "[::1]:80"):
        with pytest.raises(UserError, match="not a host"):
            parse_host(wrong)
    for wrong in ("80", "65400", "x", "-1", "", "٣٤٥٦"):
        with pytest.raises(UserError, match="not a port"):
            parse_port(wrong)


def test_names_and_labels_are_checked():
    assert check_name(None) is None
    assert check_name(host_name()) == host_name()
    assert join_labels(["room=attic", "gpu=a100"]) == "room=attic,gpu=a100"
    for wrong in ("", "a b", "-x", "x" * 64, "a,b"):
        with pytest.raises(UserError, match="name of a machine"):
            check_name(wrong)
    for wrong in ("room", "a=b,c=d", "=x", "a="):
        with pytest.raises(UserError, match="KEY=VALUE"):
            join_labels([wrong])


@pytest.mark.parametrize(
    ("verb", "argv", "words"),
    [
        ("up", [], "shoal up --cluster"),
        ("up", ["--cluster", "--invite"], "No cluster is up"),
        ("up", ["--cluster", "--port", "80"], "not a port"),
        ("up", ["--cluster", "--address", "203.0.113.7"], "no address 203.0.113.7"),
        ("up", ["--cluster", "--surprise"], "--surprise"),
        ("join", [], "HOST"),
        ("join", ["10.0.0.1", "--code", "ABC"], "not a join code"),
        ("join", ["127.0.0.1"], "A code is needed"),
        ("nodes", [], "in no cluster"),
        ("leave", [], "in no cluster"),
        ("down", ["--json"], "in no cluster"),
    ],
)
def test_bad_input_is_told(home, verb, argv, words):
    with pytest.raises(UserError) as told:
        getattr(verbs, verb)(argv)
    assert words in told.value.render()


def test_the_wrong_verb_for_a_role_is_told(cluster):
    write_cluster(cluster)
    with pytest.raises(UserError, match="was begun on"):
        verbs.down([])
    with pytest.raises(UserError, match="in the cluster of"):
        verbs.up(["--cluster"])
    with pytest.raises(UserError, match="in the cluster of"):
        verbs.join(["10.0.0.9"])
    write_cluster(replace(cluster, role=HEAD))
    with pytest.raises(UserError, match="first of the cluster"):
        verbs.leave([])
    with pytest.raises(UserError, match="cluster of its own"):
        verbs.join(["10.0.0.9"])


def test_a_machine_without_ray_is_told_what_to_install(home, monkeypatch):
    monkeypatch.setattr("shoal.cluster.versions._installed", lambda package: "none")
    with pytest.raises(UserError, match="Ray is not installed") as told:
        verbs.up(["--cluster"])
    assert "pip install 'shoal[ray]'" in told.value.hint
