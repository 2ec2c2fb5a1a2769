"""A link that is slow on purpose is measured as slow; two hosts, and nothing of Ray."""

import json
import subprocess
import sys

import pytest

from shoal.testing import rigs

pytestmark = [rigs.needs("root", "ip", "tc", "nsenter", "network namespaces"), pytest.mark.timeout(120)]

ANSWER = """
import sys, time
from shoal.cluster.measuring import End
print(End(sys.argv[1]).listen("token"), flush=True)
time.sleep(60)
"""
CALL = """
import json, sys
from shoal.cluster.measuring import End
print(json.dumps(End(sys.argv[1]).call(sys.argv[2], int(sys.argv[3]), "token")))
"""


def test_a_slow_way_back_is_found():
    with rigs.hosts(2) as hosts:
        hosts.shape(1, rate_mbit=20)
        command = [sys.executable, "-c", ANSWER, hosts.address(1)]
        answering = hosts.start(1, command, stdout=subprocess.PIPE, text=True)
        assert answering.stdout is not None
        port = answering.stdout.readline().strip()
        call = [sys.executable, "-c", CALL, hosts.address(0), hosts.address(1), port]
        done = hosts.run(0, call, capture_output=True, text=True, timeout=100, check=True)
        answering.kill()
        answering.communicate()
    found = json.loads(done.stdout)
    assert found["latency_seconds"] > 0
    assert 5 < found["backward"] * 8 / 1e6 < 30
    assert found["forward"] > 2 * found["backward"]
