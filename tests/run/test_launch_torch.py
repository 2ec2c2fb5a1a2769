"""Scripts written for torchrun run as they are."""

import json
import socket

import pytest
from launching import Box, box

from shoal.engine.ports import ReservedPorts

__all__ = ["box"]


def test_two_workers_sum_and_the_first_cause_is_found(box: Box) -> None:
    source = """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        x = torch.full((3,), float(rank + 1))
        dist.all_reduce(x)
        print("sum", x.tolist(), dist.get_world_size(), torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]))
        if rank == 1:
            raise ValueError("the loss is bad")
        dist.all_reduce(x)
    """
    box.write("train.py", source)
    done = box.run("run", "-n", "2", "train.py", timeout=60)
    assert done.returncode == 1
    assert box.log(0).startswith("sum [3.0, 3.0, 3.0] 2 True\n")
    assert box.log(1).startswith("sum [3.0, 3.0, 3.0] 2 True\n")
    lines = done.stderr.splitlines()
    assert lines[:2] == ["error: ValueError: the loss is bad", "   at: rank 1, train.py:12"]
    assert lines[2].startswith(" also: rank 0 (train.py:13), ")
    assert "Aborted" not in done.stdout


def test_a_script_ends_when_the_threads_of_gloo_have_let_go(box: Box) -> None:
    """One that needs the interpreter after its end would abort the process; here Python plays one that is slow."""
    source = """
        import ctypes, sys, threading, time

        def work():
            ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
            started.set()
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                pass
            print("let go", flush=True)
            time.sleep(60)

        sys.modules["torch.distributed"] = sys
        started = threading.Event()
        threading.Thread(target=work, daemon=True).start()
        started.wait()
    """
    box.write("slow.py", source)
    done = box.run("run", "-n", "1", "slow.py")
    assert done.returncode == 0, done.stderr
    assert box.log(0) == "let go\n"


def test_tensorflow_is_told_where_everyone_listens(box: Box) -> None:
    """What a worker of TensorFlow does first: it listens on its own port, and the port is free for it alone."""
    source = """
        import json, os, socket
        config = json.loads(os.environ["TF_CONFIG"])
        host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((host, int(port)))
        server.listen()
        print(json.dumps(config))
    """
    box.write("tf.py", source)
    done = box.run("run", "-n", "2", "--framework", "tensorflow", "tf.py")
    assert done.returncode == 0, done.stdout
    configs = [json.loads(box.log(rank)) for rank in range(2)]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(2)]
    assert len(set(configs[0]["cluster"]["worker"])) == 2


def test_a_reserved_port_is_free_for_a_store_and_for_nobody_else() -> None:
    from torch.distributed import TCPStore

    with ReservedPorts(2) as ports:
        first, second = ports.numbers
        assert first != second
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", first))
        store = TCPStore("127.0.0.1", first, world_size=1, is_master=True)
        store.set("key", "value")
        client = TCPStore("127.0.0.1", first, is_master=False)
        assert client.get("key") == b"value"
        del client, store


def test_the_kernel_gives_a_reserved_port_to_nobody() -> None:
    with ReservedPorts(1) as ports:
        taken = set()
        held = []
        for _ in range(200):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            taken.add(other.getsockname()[1])
            held.append(other)
        for other in held:
            other.close()
        assert ports.numbers[0] not in taken
