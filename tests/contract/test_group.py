"""The same suite over every group."""

from shoal.testing.group_contract import GroupContract


class TestAlone(GroupContract):
    size, transport = 1, "shm"


class TestShmOfTwo(GroupContract):
    size, transport = 2, "shm"


class TestShmOfThree(GroupContract):
    size, transport = 3, "shm"


class TestTcpOfTwo(GroupContract):
    size, transport = 2, "tcp"


class TestTcpOfThree(GroupContract):
    size, transport = 3, "tcp"


class TestTcpThroughMainMemory(GroupContract):
    size, transport, devices = 2, "tcp", ("cuda", "cpu")
