"""How a set of ranks starts and ends, between the notebook and its controller."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from nbdist.wire.base.message import Message, Seconds, Whole
from nbdist.wire.base.system_text import as_text
from nbdist.wire.processes.nodes import NodesWanted

# Serial numbers that a client may give to its cells before it needs another block.
SERIALS = 1 << 32

PATIENCE_VARIABLE = "NBDIST_START_PATIENCE"  # seconds that a start may go without progress
SLACK_VARIABLE = "NBDIST_SLACK"  # seconds that answers of ranks may take beyond their limits


class Place(msgspec.Struct, frozen=True):
    """The position of ranks in a job of several nodes, or in one that may be restarted.

    first_rank: this node's first rank. run: the job's name, for torch's elastic parts.
    master_addr, master_port: the rendezvous address of all ranks; "" for our own store.
    """

    first_rank: int = 0
    world_size: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = ""
    master_port: int = 0
    run: str = ""
    restart: int = 0
    max_restarts: int = 0


if TYPE_CHECKING:
    SystemText = str
else:
    SystemText = Any  # msgspec has no union of text and bytes


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a session that its ranks have to know, on each of its starts: by the names of its keywords.

    exact: also restore buffers and random numbers that an interrupted step changed. end_grace: by which SIGTERM is
    outlived.
    """

    gpus: list[str] | None = None
    backend: str | None = None
    init: bool = True
    timeout: Seconds = 1800.0
    exact: bool = False
    end_grace: Seconds = 0.0


class StartOptions(RankSettings, frozen=True):
    """The options of a `start`. The environment is the notebook's at that moment.

    count: of ranks on this node; 0: only the store of those on others.
    patience: seconds without progress after which the start fails.
    slack: seconds that answers of ranks may take beyond their limits, as on a loaded machine.
    fresh: each rank is its own Python process, not forked from the template.
    port: the port of the rendezvous store; 0 for any. place: position of these ranks among those of other nodes.
    all_results: whether a launched function's return values come back from all ranks, or from rank 0 only.
    fork_address: name of the Unix socket where the notebook forks ranks itself; "" if it does not.
    changed: variables that were set since the notebook began, and own_path: entries of `sys_path` that are not Python's
    own. Nodes other than the notebook's get these, and all else is theirs.
    """

    count: Whole
    environment: dict[SystemText, SystemText]
    cwd: SystemText
    sys_path: list[SystemText]
    argv: list[SystemText]
    umask: int
    open_files: int  # maximum open files of the notebook (RLIMIT_NOFILE)
    patience: Seconds = 120.0
    slack: Seconds = 0.0
    fresh: bool = False
    port: int = 0
    place: Place | None = None
    all_results: bool = True
    fork_address: str = ""
    changed: dict[SystemText, SystemText] = {}
    own_path: list[SystemText] = []

    def __post_init__(self) -> None:
        for name in ("environment", "cwd", "sys_path", "argv", "changed", "own_path"):
            msgspec.structs.force_setattr(self, name, as_text(getattr(self, name)))

    @property
    def gpus_are_parts(self) -> bool:
        """Whether some GPUs are MIG instances: CUDA shows a process one of them at most, and NCCL doesn't tell apart
        those of one GPU.
        """
        return any(name.startswith("MIG-") for name in self.gpus or [])

    @property
    def usual_backend(self) -> str:
        """The backend if none is asked for: nccl and gloo if each rank has a GPU of its own, else gloo."""
        own = len(self.gpus or []) >= self.count and bool(self.gpus) and not self.gpus_are_parts
        return "cpu:gloo,cuda:nccl" if own else "gloo"

    def with_variables(self, variables: Mapping[str, str]) -> StartOptions:
        """Return these options with more variables of the environment, on all nodes."""
        return msgspec.structs.replace(
            self, environment={**self.environment, **variables}, changed={**self.changed, **variables}
        )

    @property
    def ranks(self) -> range:
        """The rank numbers, which count through all nodes."""
        first = self.place.first_rank if self.place is not None else 0
        return range(first, first + self.count)

    def search_path(self) -> list[str]:
        """Return `sys_path` resolved against `cwd`."""
        return [os.path.join(self.cwd, entry) for entry in self.sys_path]


class Start(Message, frozen=True):
    """Bring up a set of ranks (and end the present one, if any).

    linger: seconds that it outlives a killed kernel. nodes: which it is to have; None: this machine.
    """

    options: StartOptions
    linger: Seconds = 0.0
    nodes: NodesWanted | None = None


class RankInfo(msgspec.Struct, frozen=True):
    """A rank as the notebook sees it."""

    rank: int
    pid: int
    device: str
    node: int = 0
    host: str = ""  # "": the notebook's


Stage = Literal["nodes", "import", "join"]  # of a start: nodes come, torch is imported, ranks join their group


class Progress(Message, frozen=True):
    """What a start is doing at the moment. text: in plain words."""

    stage: Stage
    text: str


class Started(Message, frozen=True):
    """The ranks are up and their process group is ready.

    first_serial: where the client's count of cells starts. slack: seconds that answers may take beyond their limits.
    ends_at: when the first job of a node ends, by `time.time`.
    """

    incarnation: int
    ranks: list[RankInfo]
    backend: str
    notes: list[str]
    first_serial: int
    slack: Seconds = 0.0
    ends_at: float | None = None


Obstacle = Literal["port taken", "other"]  # why ranks could not start


class StartFailed(Message, frozen=True):
    """The ranks could not be started; none is left."""

    text: str
    obstacle: Obstacle = "other"


class Stop(Message, frozen=True):
    """End the ranks, by force after `grace` seconds. The controller, its agent and the template stay."""

    grace: Seconds = 1.0


class Stopped(Message, frozen=True):
    """The ranks have ended."""


class Shutdown(Message, frozen=True):
    """End everything."""


class Died(Message, frozen=True):
    """A rank's process has ended. serial: the cell it ran, 0 for none. cause: the end it follows from, if any.

    machine_lost: that is the loss of its machine.
    """

    rank: int
    pid: int
    code: int
    stderr: str
    serial: int
    when: float
    cause: str = ""
    machine_lost: bool = False


class Broken(Message, frozen=True):
    """The session is over: every rank is gone, and why. wanted: whether somebody has ended it, and nothing broke."""

    text: str
    wanted: bool = False
