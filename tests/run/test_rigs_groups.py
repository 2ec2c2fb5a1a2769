"""Groups over sockets between hosts: on a slow link, and when a host is cut off."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.testing import rigs

RANK = Path(__file__).with_name("host_rank.py")
TIMEOUT = 3.0
MEBIBIT = 250_000 * 4 * 8 / 1e6

pytestmark = rigs.needs("root", "ip", "tc", "nsenter", "network namespaces")


class Member:
    """A rank on a host, and what it says."""

    def __init__(self, hosts: rigs.Hosts, rank: int) -> None:
        command = [sys.executable, str(RANK), str(rank), str(hosts.count), hosts.address(0), "29500", str(TIMEOUT)]
        self.process = hosts.start(rank, command, stdout=subprocess.PIPE, text=True)

    def hear(self, kind: str) -> dict[str, Any]:
        """Its next word of this kind."""
        assert self.process.stdout is not None
        words = (json.loads(line) for line in self.process.stdout)
        return next(word for word in words if word["seen"] == kind)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start():
    members: list[Member] = []

    def start(hosts: rigs.Hosts) -> list[Member]:
        members.extend(Member(hosts, rank) for rank in range(hosts.count))
        return members

    yield start
    for member in members:
        member.close()


def test_a_sum_takes_as_long_as_the_link_needs(start):
    with rigs.hosts(2, rate_mbit=20) as hosts:
        sums = [member.hear("sum") for member in start(hosts)]
    assert {word["value"] for word in sums} == {4.0}
    # Each of two ranks sends as many bits as the tensor has, half of them twice.
    needed = MEBIBIT / 20
    assert all(0.8 * needed < word["seconds"] < 10 * needed for word in sums), sums


@pytest.mark.parametrize("how", [pytest.param("partition", marks=pytest.mark.slow), "unplug"])
def test_a_host_that_is_cut_off_is_named_in_time(start, how):
    with rigs.hosts(3) as hosts:
        members = start(hosts)
        for member in members:
            member.hear("step")
        getattr(hosts, how)(2)
        cut_at = time.monotonic()
        for member in members[:2]:
            word = member.hear("MemberLost")
            assert word["ranks"] == [2], word
            assert word["at"] - cut_at < TIMEOUT + 15.0, word
