"""A writer that is stopped and killed: others may look meanwhile, and what it acknowledged is there."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from shoal.checkpoint.store import FolderStore
from shoal.testing.power_loss import Writer
from shoal.testing.rigs import freeze
from shoal.testing.store_contract import assert_same, make_state


def test_others_may_look_while_it_writes_and_nothing_is_lost_when_it_dies(tmp_path: Path):
    """Frozen at random moments, often within a save: others find its last word and leave its files alone."""
    chance = random.Random(1)
    command = [sys.executable, "-m", "shoal.testing.checkpoint_writer", "write", str(tmp_path), "1000000", "2", "0"]
    with Writer(command) as writer:
        for _ in range(15):
            time.sleep(chance.uniform(0.01, 0.05))
            with freeze(writer.pid):
                acknowledged = writer.drain()
                loaded = FolderStore(tmp_path).load()
                assert acknowledged <= loaded.state.step <= acknowledged + 1
                assert_same(loaded.state, make_state(loaded.state.step, generation=0))
        time.sleep(0.05)
        with freeze(writer.pid):
            acknowledged = writer.drain()
            os.kill(writer.pid, signal.SIGKILL)
    assert FolderStore(tmp_path).load().state.step >= acknowledged > 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".writing", ".removing"))]
