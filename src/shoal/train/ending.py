"""Being told to end: the step is finished and a checkpoint saved first, if half the grace is enough for that."""

import os
import signal
import threading
from types import FrameType

from shoal.engine.env import WorkerFacts
from shoal.engine.signals import grace_of
from shoal.engine.worker import end_with_parent

PATIENCE = 0.5
"""The part of the grace that we use: whoever told us to end kills us after all of it."""


class Ending:
    """Notices SIGTERM in a worker of ours. `is_asked` is what the training loop looks at between steps.

    A process that does not reach the end of a step in time, or is not in a step at all, ends at once as it would have
    without us. Scripts that have a handler of their own keep it.

    Where an agent started us and is gone, so is our machine, as far as others know: the kernel ends us at once, and
    we do not get to tell them that the run is to end. By whom a SIGTERM was sent cannot be seen: of an agent that
    is being killed, threads may be left.
    """

    def __init__(self, facts: WorkerFacts) -> None:
        self.is_asked = False
        self.is_stepping = False
        self._patience_seconds = PATIENCE * grace_of(facts.options)
        is_ours = facts.control_fd is not None and threading.current_thread() is threading.main_thread()
        if is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            if facts.has_agent:
                end_with_parent(signal.SIGKILL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:  # when a launcher dies, the kernel tells us, and then its guard: nobody is in more haste
            return
        if not self.is_stepping:
            self.end()
        self.is_asked = True
        timer = threading.Timer(self._patience_seconds, self.end)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """End by the signal, as everybody expects; from another thread that cannot be had, so by a stronger one."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
