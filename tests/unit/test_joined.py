"""What launchers say about a process, and what becomes of it.

Recorded, without those that nobody reads here: Open MPI 4.1.4 (rank 3 of 4 on two hosts), MPICH 4.0.2 (rank 1 of 2 on
one), Slurm 22.05 (`srun -n 2` on one node, `srun -N 3 -n 5` on three, and what a batch script has). Made up, from
manuals: combinations of launchers, `SLURM_CPU_BIND`, the number of the step that is the shell of salloc, torchrun's.
"""

import socket

import pytest

from shoal.engine import joined, meeting_point, mpi
from shoal.engine.env import read_worker
from shoal.engine.hosts import Host, allocated_hosts
from shoal.engine.meeting_point import MeetingPoint
from shoal.engine.place import Place, find_place, host_names, tasks_per_node
from shoal.spec.errors import UserError
from shoal.verbs import launching

OPEN_MPI = {
    "OMPI_APP_CTX_NUM_PROCS": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_ess": "^singleton",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_UNIVERSE_SIZE": "8",
    "PMIX_RANK": "3",
}
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM = {
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GTIDS": "0,1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2",
}
SLURM_NODES = {
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_GTIDS": "4",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "shoal[0-2]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "shoal[0-2]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
ON_ONE = {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2}
ON_SECOND_OF_TWO = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "node": 1, "num_nodes": 2}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        pytest.param({}, Place(), id="nobody"),
        pytest.param(OPEN_MPI, Place(launcher="mpi", **ON_SECOND_OF_TWO), id="Open MPI"),
        pytest.param(
            {**OPEN_MPI, "OMPI_MCA_orte_bound_at_launch": "1"},
            Place(launcher="mpi", is_bound=True, **ON_SECOND_OF_TWO),
            id="Open MPI, bound",
        ),
        pytest.param(HYDRA, Place(launcher="mpi", **ON_ONE), id="MPICH"),
        pytest.param(
            SLURM,
            Place(launcher="slurm", first_host="vm", job=(1, 0), **ON_ONE),
            id="Slurm",
        ),
        pytest.param(
            SLURM_NODES,
            Place(
                launcher="slurm",
                rank=4,
                size=5,
                local_rank=0,
                local_size=1,
                node=2,
                num_nodes=3,
                first_host="shoal0",
                job=(1, 0),
                num_cores=1,
            ),
            id="Slurm, three nodes",
        ),
        pytest.param(SLURM_BATCH, Place(), id="a batch script of Slurm"),
        pytest.param({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA)}, Place(), id="the shell of salloc"),
        pytest.param(TORCHRUN, Place(launcher="torchrun", **ON_SECOND_OF_TWO), id="torchrun"),
        pytest.param({**SLURM, **OPEN_MPI}, Place(launcher="mpi", **ON_SECOND_OF_TWO), id="mpirun in a Slurm job"),
        pytest.param({**SLURM, **HYDRA}, Place(launcher="mpi", **ON_ONE), id="MPICH in a Slurm job"),
        pytest.param(
            {**OPEN_MPI, **TORCHRUN}, Place(launcher="torchrun", **ON_SECOND_OF_TWO), id="torchrun under mpirun"
        ),
    ],
)
def test_a_launcher_says_who_we_are(env: dict[str, str], place: Place) -> None:
    assert find_place(env) == place


@pytest.mark.parametrize(
    ("binding", "is_bound"), [("quiet,mask_cpu:0x0000000F", True), ("quiet,map_cpu:0,1", True), ("quiet,none", False)]
)
def test_slurm_says_whether_cores_are_our_own(binding: str, is_bound: bool) -> None:
    assert find_place({**SLURM, "SLURM_CPU_BIND": binding}).is_bound == is_bound


def test_srun_with_pmi_is_slurm() -> None:
    assert find_place({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE is 'four'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "'2x3'"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of 4"),
    ],
)
def test_what_cannot_be_true_is_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as error:
        find_place(env)
    assert told in error.value.message
    assert error.value.why
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("a[5,1-3]-ib,b[1-2]", ["a5-ib", "a1-ib", "a2-ib", "a3-ib", "b1", "b2"]),
        ("node[099-101],x", ["node099", "node100", "node101", "x"]),
        ("rack[2-3]n[07,09].cluster", [f"rack{r}n{n}.cluster" for r in (2, 3) for n in ("07", "09")]),
        ("", []),
    ],
)
def test_names_in_a_list_of_nodes(text: str, names: list[str]) -> None:
    assert host_names(text) == names


@pytest.mark.parametrize("text", ["n[a-b]", "n[]", "n[1--3]"])
def test_a_list_of_nodes_that_is_none_is_told(text: str) -> None:
    with pytest.raises(UserError, match="of the names of nodes") as caught:
        host_names(text)
    assert "--hosts" in caught.value.hint


def test_the_hosts_of_an_allocation() -> None:
    assert allocated_hosts({}) == []
    assert allocated_hosts(SLURM) == [Host(name="vm", num_slots=2)]
    assert allocated_hosts(SLURM_NODES) == [
        Host(name="shoal0", num_slots=3),
        Host(name="shoal1", num_slots=1),
        Host(name="shoal2", num_slots=1),
    ]
    assert allocated_hosts({"SLURM_JOB_NODELIST": "a,b"}) == [Host(name="a"), Host(name="b")]


def test_hosts_of_an_allocation_are_those_of_mpi_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM_NODES.items():
        monkeypatch.setenv(name, value)
    assert [host.name for host in mpi.find_hosts(None)] == ["shoal0", "shoal1", "shoal2"]
    assert mpi.find_hosts("a:2") == [Host(name="a", num_slots=2)]
    for args, count in ((["--engine", "mpi"], 5), (["--engine", "mpi", "--hosts", "a:2"], 2), ([], 1)):
        assert launching._count_slots(launching._run_parser().parse_args(args)) == count


def test_tasks_per_node() -> None:
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_torch_and_a_trainer_read_it_as_from_torchrun() -> None:
    place = find_place(SLURM_NODES)
    point = MeetingPoint(address="shoal0", port=10217, own_address="10.0.0.9", interface="ib0")
    facts = read_worker(joined.facts_of(place, point))
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (4, 5, 0, 1)
    assert (facts.group_rank, facts.num_nodes) == (2, 3)
    assert (facts.master_addr, facts.master_port) == ("shoal0", 10217)
    assert joined.defaults_of(place, point) == {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "ib0",
        "TP_SOCKET_IFNAME": "ib0",
    }


def test_cores_are_shared_by_the_ranks_of_a_node_unless_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "available_cores", lambda: 8)
    point = MeetingPoint(address="127.0.0.1", port=1)

    def threads(**facts: object) -> str:
        return joined.defaults_of(Place(launcher="mpi", size=4, **facts), point)["OMP_NUM_THREADS"]  # type: ignore[arg-type]

    assert threads(local_size=4) == "2"
    assert threads(local_size=4, is_bound=True) == "8"
    assert threads(local_size=4, num_cores=3) == "3"
    assert threads(local_size=16) == "1"


def test_ranks_of_slurm_agree_where_to_meet_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [meeting_point.find_without_mpi(find_place({**SLURM, "SLURM_PROCID": rank}), {}) for rank in "01"]
    assert near[0] == near[1]
    assert (near[0].address, near[0].interface) == ("127.0.0.1", "lo")
    assert 10_000 <= near[0].port < 30_000
    later = meeting_point.find_without_mpi(find_place({**SLURM, "SLURM_STEP_ID": "1"}), {})
    assert later.port != near[0].port
    monkeypatch.setattr(meeting_point, "route_to", {"shoal0": "10.0.0.9", "ib-shoal0": "10.1.0.9"}.__getitem__)
    monkeypatch.setattr(meeting_point, "interfaces", lambda: {"10.0.0.9": "eth0", "10.1.0.9": "ib0"})
    far = meeting_point.find_without_mpi(find_place(SLURM_NODES), {})
    assert (far.address, far.own_address, far.interface) == ("shoal0", "10.0.0.9", "eth0")
    asked = {"MASTER_ADDR": "ib-shoal0", "MASTER_PORT": "29500"}
    told = meeting_point.find_without_mpi(find_place(SLURM_NODES), asked)
    assert told == MeetingPoint(address="ib-shoal0", port=29500, own_address="10.1.0.9", interface="ib0")


def test_a_name_that_leads_to_loopback_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_point, "route_to", lambda address: "127.0.1.1")
    monkeypatch.setattr(meeting_point, "interfaces", lambda: {"10.0.0.9": "eth0"})
    point = meeting_point.find_without_mpi(find_place(SLURM_NODES), {})
    assert (point.own_address, point.interface) == ("10.0.0.9", "eth0")


def test_no_way_to_rank_0_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(address: str) -> str:
        raise UserError(f"There is no way to the host {address!r}.")

    monkeypatch.setattr(meeting_point, "route_to", nowhere)
    with pytest.raises(UserError, match="no way to the host 'shoal0'"):
        meeting_point.find_without_mpi(find_place(SLURM_NODES), {})
    without = {name: value for name, value in SLURM_NODES.items() if "NODELIST" not in name}
    with pytest.raises(UserError, match="not known where rank 0 is"):
        meeting_point.find_without_mpi(find_place(without), {})


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(UserError, match="MASTER_PORT"):
        meeting_point.find_without_mpi(Place(), {"MASTER_PORT": port})


def test_addresses_of_this_machine_have_a_device_and_are_not_loopback() -> None:
    names = {name for _, name in socket.if_nameindex()}
    for address, name in meeting_point.interfaces().items():
        assert name in names
        assert not address.startswith("127.")


@pytest.mark.parametrize(
    ("argv", "told"), [([], "No script"), (["-m"], "No script"), (["-n", "2", "train.py"], "no option '-n'")]
)
def test_what_is_not_a_script_is_told_by_one_rank_of_a_node(argv, told, monkeypatch, capsys) -> None:
    monkeypatch.setattr(joined.time, "sleep", lambda seconds: None)
    for rank, is_told in ((0, True), (1, False)):
        place = Place(launcher="mpi", rank=rank, size=2, local_rank=rank, local_size=2)
        monkeypatch.setattr(joined, "find_place", lambda env, place=place: place)
        assert joined.main(argv) == 2
        assert (told in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [(None, 0, ""), (0, 0, ""), (7, 7, ""), (-1, 255, ""), ("no data", 1, "no data\n"), ((1, 2), 1, "(1, 2)\n")],
)
def test_exit_codes_are_those_of_python(code: object, exit_code: int, told: str, capsys) -> None:
    assert joined.tell_exit(SystemExit(code)) == exit_code
    assert capsys.readouterr().err == told


def test_help_is_printed(capsys) -> None:
    assert joined.main(["--help"]) == 0
    assert "mpirun -n 4 shoal worker train.py" in capsys.readouterr().out
