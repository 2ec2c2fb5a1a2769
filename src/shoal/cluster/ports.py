"""Which ports a machine of a cluster uses. They are the same on every machine, so that a firewall can be told."""

from dataclasses import dataclass

DEFAULT_PORT = 7480
NUM_PORTS = 200
_FIRST_WORKER = 20


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a cluster, all counted from the first."""

    first: int = DEFAULT_PORT

    @property
    def door(self) -> int:
        """Where the first machine lets others in, while an invitation is open."""
        return self.first

    @property
    def gcs(self) -> int:
        """Where Ray's head listens."""
        return self.first + 1

    @property
    def node_manager(self) -> int:
        return self.first + 2

    @property
    def object_manager(self) -> int:
        return self.first + 3

    @property
    def agent_grpc(self) -> int:
        return self.first + 4

    @property
    def agent_http(self) -> int:
        return self.first + 5

    @property
    def runtime_env(self) -> int:
        return self.first + 6

    @property
    def metrics(self) -> int:
        return self.first + 7

    @property
    def client(self) -> int:
        """Ray's own way in for programs elsewhere, which it always opens on its head; it asks for the token."""
        return self.first + 8

    @property
    def head_metrics(self) -> int:
        return self.first + 9

    @property
    def workers(self) -> range:
        """One for each of Ray's worker processes."""
        return range(self.first + _FIRST_WORKER, self.first + NUM_PORTS)

    @property
    def fixed(self) -> dict[int, str]:
        """What has to be free on every machine, with what it is for."""
        return {
            self.node_manager: "Ray's node manager",
            self.object_manager: "Ray's object manager",
            self.agent_grpc: "Ray's agent",
            self.agent_http: "Ray's agent",
            self.runtime_env: "Ray's agent",
            self.metrics: "Ray's metrics",
        }

    @property
    def fixed_on_head(self) -> dict[int, str]:
        """What has to be free on the first machine."""
        return {
            self.door: "shoal's door for those who join",
            self.gcs: "Ray's head",
            **self.fixed,
            self.client: "Ray's clients",
            self.head_metrics: "Ray's metrics",
        }

    @property
    def between_machines(self) -> dict[int, str]:
        """What every machine must be able to reach on every other, as far as it is worth trying."""
        return {
            self.node_manager: "Ray's node manager",
            self.object_manager: "Ray's object manager",
            self.workers[0]: "Ray's workers",
            self.workers[-1]: "Ray's workers",
        }
