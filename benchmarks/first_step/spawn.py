"""The same step in processes that torch.multiprocessing spawns: `spawn.py FOLDER`."""

import os
import socket
import sys

import ddp
import torch.multiprocessing


def work(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ddp.main(folder)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (number, sys.argv[1]), nprocs=2)
