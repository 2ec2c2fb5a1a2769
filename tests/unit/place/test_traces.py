"""Traces and clusters from files: what is read, and what is said of mistakes."""

import json
from pathlib import Path

import pytest

from shoal.place.described import read_cluster
from shoal.place.policies import POLICIES
from shoal.place.simulate import Setting, simulate
from shoal.place.traces.opening import read_trace
from shoal.place.traces.pollux import NODES, read_pollux
from shoal.spec.errors import UserError
from shoal.verbs.simulate import main

DATA = Path(__file__).parents[4] / "shared" / "data" / "sched"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the published traces are not beside the repo")
HEADER = "id,submitted_at,seconds,workers,gpus\n"


def written(folder, text, name="trace.csv"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "a,0,ten,1,1\n", "line 2, column 'seconds': 'ten' is not a number"),
        (HEADER + "a,0,5,1,1\nb,nan,5,1,1\n", "line 3, column 'submitted_at'"),
        (HEADER + "a,0,5,1.5,1\n", "column 'workers': 1.5 is not a whole number"),
        (HEADER + "a,0,-5,1,1\n", "column 'seconds': -5 is out of range"),
        (HEADER + "a,0,5,1e18,1\n", "column 'workers': 1e.18 is out of range: at most 1e.09"),
        ("submitted_at,seconds,speedup\n0,5,400\n", "column 'speedup': 400 is out of range: at most 10"),
        ("submitted_at,seconds,memory_gib\n0,5,1e12\n", "column 'memory_gib': 1e.12 is out of range"),
        (HEADER + "a,0,5,1,1,9\n", "line 2: more cells"),
        (HEADER, "has no jobs"),
        ("id,when\na,0\n", "no trace of a known form"),
        ('[{"submitted_at": 0, "seconds": 5},', "valid JSON|Expecting"),
    ],
)
def test_mistakes_in_traces_are_told_with_their_place(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        read_trace(written(tmp_path, text))


def test_csv_and_json_give_the_same_jobs(tmp_path):
    rows = [{"id": "a", "submitted_at": 0, "seconds": 5, "workers": 2, "gpus": 1}]
    one = read_trace(written(tmp_path, HEADER + "a,0,5,2,1\n"))
    other = read_trace(written(tmp_path, json.dumps(rows), "trace.json"))
    assert [job.seen() for job in one] == [job.seen() for job in other]


@pytest.mark.parametrize(
    "text", ["0x4:t4", "16by4", "", "4x4+", "none.toml", "999999999x4", "1x99999999", f"{9:05000}x1"]
)
def test_clusters_that_are_none_are_told(text):
    with pytest.raises(UserError):
        read_cluster(text)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ('"count": 1e400', "count is inf"),
        ('"gpus": 1.5', "gpus is 1.5"),
        ('"cores": 1e308', "cores is 1e.308"),
        ('"memory_gib": NaN', "memory_gib is nan"),
    ],
)
def test_nodes_that_cannot_be_are_told(tmp_path, node, said):
    with pytest.raises(UserError, match=said):
        read_cluster(str(written(tmp_path, f'{{"nodes": [{{{node}}}]}}', "c.json")))


def test_clusters_as_text_and_as_file(tmp_path):
    nodes = read_cluster("2x4:t4+1x8:a100")
    assert [(node.kind, node.gpus) for node in nodes] == [("t4", 4), ("t4", 4), ("a100", 8)]
    text = '[[nodes]]\ncount = 2\ngpus = 4\nkind = "t4"\n[[nodes]]\ngpus = 8\nkind = "a100"\n'
    found = read_cluster(str(written(tmp_path, text, "c.toml")))
    assert [(node.kind, node.gpus) for node in found] == [("t4", 4), ("t4", 4), ("a100", 8)]


def test_the_verb_tells_and_draws(tmp_path, capsys):
    trace = written(tmp_path, HEADER + "a,0,90,1,1\nb,10,30,4,1\n")
    picture = tmp_path / "a.svg"
    assert main([str(trace), "--policy", "fifo", "--cluster", "1x4:t4", "--json", "--plot", str(picture)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_ended"] == 2
    assert {job["job"] for job in facts["jobs"]} == {"a", "b"}
    assert picture.read_text().startswith("<svg")
    with pytest.raises(UserError, match="no policy 'fif'"):
        main([str(trace), "--policy", "fif"])


@needs_data
def test_a_published_job_takes_as_long_as_published():
    """The first cifar10 of workload 6 under Tiresias runs on 6 GPUs at once, undisturbed."""
    folder = DATA / "pollux-osdi21"
    work = read_pollux(folder / "workloads" / "workload-6.csv", folder / "profiles", is_rigid=True)[:1]
    result = simulate(work, POLICIES["las"], Setting(nodes=NODES))
    rows = [line.split(",") for line in (folder / "published-results" / "jcts.csv").read_text().splitlines()]
    expected = next(
        float(row[4]) for row in rows if row[:4] == ["jobload-1.0", "tiresias", "workload-6", "cifar10-0"]
    )
    assert result.outcomes[0].jct_seconds == expected


@needs_data
@pytest.mark.parametrize(
    ("trace", "cluster", "more"),
    [
        ("gavel-osdi20/physical_cluster/small_test.trace", "1x4:v100+1x4:k80", []),
        ("gavel-osdi20/msr-seed0/11cb48.trace", "9x4:v100", ["--skip-unmeasured", "--round", "86400"]),
        ("shockwave-nsdi23/trace-120jobs.trace", "8x4:v100", ["--round", "3600"]),
        ("tiresias-nsdi19/60_job.csv", "8x8:gpu", []),
    ],
)
def test_published_traces_are_simulated_as_they_are(capsys, trace, cluster, more):
    assert main([str(DATA / trace), "--policy", "las", "--cluster", cluster, "--json", *more]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_ended"] == facts["num_jobs"] > 0


def test_a_trace_of_steps_needs_its_table_and_nodes_of_its_kinds(tmp_path):
    line = "LM (batch size 5)\t\t\t\t1\t600\t1\t1\t-1\t0\n"
    (tmp_path / "set").mkdir()
    trace = written(tmp_path / "set", line, "a.trace")
    with pytest.raises(UserError, match="does not say how fast"):
        main([str(trace)])
    table = '{"v100": {"(\'LM (batch size 5)\', 1)": {"null": 2.0}}}'
    written(tmp_path, table, "set_throughputs.json")
    written(tmp_path, table, "other_throughputs.json")
    with pytest.raises(UserError, match="gets nothing done on any node"):
        main([str(trace), "--cluster", "1x1:t4"])
    assert main([str(trace), "--cluster", "1x1:v100"]) == 0
    written(tmp_path / "set", line.replace("LM", "GAN"), "b.trace")
    with pytest.raises(UserError, match="no throughput of 'GAN"):
        main([str(tmp_path / "set" / "b.trace"), "--cluster", "1x1:v100"])


def test_lists_of_pods_and_nodes_are_a_trace_and_a_cluster(tmp_path, capsys):
    columns = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase"
    columns += ",creation_time,deletion_time,scheduled_time\n"
    rows = "a,4000,1024,1,500,,LS,Succeeded,0,100,10\nb,4000,1024,1,500,P100,LS,Pending,0,40,\n"
    pods = written(tmp_path, columns + rows, "pods.csv")
    nodes = written(tmp_path, "sn,cpu_milli,memory_mib,gpu,model\nn0,8000,4096,1,P100\n", "nodes.csv")
    assert main([str(pods), "--cluster", str(nodes), "--policy", "fifo", "--round", "5", "--json"]) == 0
    jobs = {job["job"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert (jobs["a"]["run_seconds"], jobs["b"]["run_seconds"]) == (90.0, 40.0)


def test_the_settings_of_a_service_hold_in_a_simulation(tmp_path, capsys):
    trace = written(tmp_path, "id,submitted_at,seconds,gpus,owner\na,0,60,1,ann\nb,0,60,1,ann\n")
    text = 'policy = "las"\n[partitions.default]\nmax_workers_per_user = 1\n'
    settings = written(tmp_path, text, "service.toml")
    assert main([str(trace), "--cluster", "1x4", "--settings", str(settings), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["policy"] == "las"
    assert sorted(job["ended_at"] for job in facts["jobs"])[1] > 100
    with pytest.raises(UserError, match=r"service\.toml"):
        main([str(trace), "--settings", str(written(tmp_path, "polcy = 1\n", "service.toml"))])
