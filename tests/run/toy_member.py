"""A member of an elastic run that speaks the launcher's protocol and trains nothing.

It makes a step every 10 ms while it is in a World. Files in the working folder tell it what to do: `finish`,
`raise-N` and `retry-N` for worker N, and `grace` to keep a note when it is asked to end.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

WORKER, INCARNATION = int(os.environ["RANK"]), int(os.environ["SHOAL_INCARNATION"])
ID = f"{WORKER}.{INCARNATION}"
CONTROL, WORLD = int(os.environ["SHOAL_CONTROL_FD"]), int(os.environ["SHOAL_WORLD_FD"])
STEP_SECONDS, BEAT_SECONDS, PATIENCE_SECONDS = 0.01, 0.05, 0.3


class Member:
    """Follows one World after the other."""

    def __init__(self):
        self.generation, self.peers, self.step = -1, [], 0
        self.is_stepping = False
        self.rest = b""
        self.beat_at = 0.0

    def send(self, kind, **data):
        event = {"kind": kind, "time": time.time(), "rank": WORKER, "step": self.step, "data": data}
        with contextlib.suppress(BrokenPipeError):  # pipes of a dead launcher end before the signal about it comes
            os.write(CONTROL, json.dumps(event).encode() + b"\n")

    def run(self):
        self.beat()
        self.send("ready", trainer=0, call=0, process={"pid": os.getpid(), "node": "here"})
        while not os.path.exists("finish"):
            self.obey_files()
            if select.select([WORLD], [], [], STEP_SECONDS)[0]:
                self.read()
            if self.is_stepping:
                self.step += 1
            if time.monotonic() > self.beat_at + BEAT_SECONDS:
                self.beat()

    def obey_files(self):
        if os.path.exists(f"raise-{WORKER}"):
            raise ValueError("a mistake of the user")
        if os.path.exists(f"retry-{WORKER}"):
            os.unlink(f"retry-{WORKER}")
            import shoal

            raise shoal.Retryable("the server went away")

    def beat(self):
        self.beat_at = time.monotonic()
        place = {"generation": self.generation, "trainer": 0, "call": 0, "step": self.step}
        self.send("beat", **place, is_stepping=self.is_stepping)
        with open(f"alive-{ID}", "w") as file:
            file.write(str(time.time()))
        late = {peer: self.silence_of(peer) for peer in self.peers}
        missing = [peer for peer, seconds in late.items() if seconds > PATIENCE_SECONDS]
        if missing and self.is_stepping:
            self.send("waiting", generation=self.generation, members=missing, seconds=max(late.values()))

    def silence_of(self, peer):
        try:
            return time.time() - os.stat(f"alive-{peer}").st_mtime
        except OSError:
            return 0.0

    def read(self):
        data = os.read(WORLD, 65536)
        if not data:
            self.note("orphaned")
            if os.path.exists("grace"):
                time.sleep(5)  # the signal comes now
            sys.exit(3)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            getattr(self, f"on_{message['kind']}")(message)

    def on_world(self, message):
        ids = [member["id"] for member in message["members"]]
        self.generation = message["generation"]
        print(f"world {self.generation}: {' '.join(ids)}", flush=True)
        if ID not in ids:
            sys.exit(0)
        self.peers = [peer for peer in ids if peer != ID]
        self.send("gather", generation=self.generation, trainer=0, key="enter", value=[WORKER, self.step])

    def on_gathered(self, message):
        if message["generation"] == self.generation:
            print(f"gathered {[worker for worker, _ in message['values']]}", flush=True)
            self.step = max(step for _, step in message["values"])
            self.is_stepping = True

    def on_hold(self, message):
        self.is_stepping = False
        self.send("boundary", generation=message["generation"], trainer=0, call=0, step=self.step)

    def on_called(self, message):
        pass

    def on_stop(self, message):
        self.note(f"stop {message['reason']}")

    def note(self, text):
        with open(f"note-{ID}", "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    member = Member()

    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel sends one, the guard another
        time.sleep(0.6)  # a checkpoint takes a while
        member.note("saved")
        sys.exit(0)

    if os.path.exists("grace"):
        signal.signal(signal.SIGTERM, save)
    member.run()
