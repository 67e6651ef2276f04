"""The jobs of this user on this machine: those that answer looks, and those that only their processes show."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil

from nbdist.cluster.launchers import RankOfJob, rank_of_job
from nbdist.serving.look_messages import (
    LookFailed,
    LookRequest,
    RankLook,
    folder,
    name_of_job,
    receive,
    send,
    short_path,
)

ANSWER_LIMIT = 3.0  # seconds
_AT_ONCE = 16
_LARGEST_ENVIRONMENT = 1 << 20
_OWN_RANK = "nbdist.worker.rank"  # in the command of a session's rank that is a Python of its own


@dataclass(frozen=True)
class JobProcess:
    """A rank of a job.

    Attributes:
        job: The name of the job.
        rank: Its number.
        world_size: Ranks on all machines.
        pid: Its process.
        address: Its socket; None: it does not answer looks.
    """

    job: str
    rank: int
    world_size: int
    pid: int
    address: Path | None = None


@dataclass
class FoundJob:
    """A job.

    Attributes:
        name: By which it is asked for.
        processes: Its ranks on this machine, in order.
    """

    name: str
    processes: list[JobProcess] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return max(each.world_size for each in self.processes)

    @property
    def serves(self) -> bool:
        """Whether any of its ranks answers looks."""
        return any(each.address is not None for each in self.processes)

    def look(self, collectives: int = 0, *, names: bool = False) -> Mapping[int, RankLook | str]:
        """Return what ranks answer, or why they don't, by rank.

        Args:
            collectives: How many of the last ones each adds.
            names: Whether each adds the names in the script's innermost function.
        """
        request = LookRequest(collectives, names)
        with ThreadPoolExecutor(_AT_ONCE, "nbdist-jobs") as pool:
            answers = list(pool.map(lambda process: _ask(process, request), self.processes))
        return {each.rank: answer for each, answer in zip(self.processes, answers, strict=True)}


def find_jobs() -> list[FoundJob]:
    """Return the jobs that have ranks on this machine, those of nbdist's own sessions left out."""
    launched, others = _launched()
    served = {each.pid: each for each in _served() if each.pid not in others}
    processes = [*served.values(), *(each for each in launched if each.pid not in served)]
    jobs: dict[str, FoundJob] = {}
    for each in sorted(processes, key=lambda process: (process.job, process.rank)):
        jobs.setdefault(each.job, FoundJob(each.job)).processes.append(each)
    return list(jobs.values())


def _served() -> Iterator[JobProcess]:
    """Yield the processes that have a socket of this user's. One whose process has ended is removed."""
    sockets = folder()
    if not sockets.is_dir() or sockets.stat().st_uid != os.getuid():
        return
    for path in sorted(sockets.glob("*-*-*")):
        job, rank, pid = path.name.split("-")
        if not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        place = rank_of_job(_environment(int(pid)))
        yield JobProcess(job, int(rank), place.world_size if place else 1, int(pid), path)


def _launched() -> tuple[list[JobProcess], set[int]]:
    """Return the processes of this user that a launcher has started as ranks of several, and those that are none.

    What ranks have started has their variables, and so has a launcher that was itself started by one.
    """
    places: dict[int, RankOfJob] = {}
    parents: dict[int, int] = {}
    for process in psutil.process_iter(["pid", "ppid", "uids", "cmdline"]):
        uids = process.info["uids"]
        if uids is None or uids.real != os.getuid() or not _is_foreign_python(process.info["cmdline"]):
            continue
        place = rank_of_job(_environment(process.pid))
        if place is not None and place.world_size > 1:
            places[process.pid], parents[process.pid] = place, process.info["ppid"]
    others = {parents[pid] for pid, place in places.items() if places.get(parents[pid], place) != place}
    others |= {pid for pid, place in places.items() if places.get(parents[pid]) == place}
    ranks = [
        JobProcess(name_of_job(own.job, pid), own.rank, own.world_size, pid)
        for pid, own in places.items()
        if pid not in others
    ]
    return ranks, others


def _is_foreign_python(command: list[str] | None) -> bool:
    """Return whether a command is a Python that runs something else than a process of a session of nbdist."""
    if not command or "python" not in os.path.basename(command[0]):
        return False
    joins = any(os.path.basename(word) == "nbdist" and verb == "join" for word, verb in pairwise(command))
    return _OWN_RANK not in command and not joins


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; {} if it can't be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()[:_LARGEST_ENVIRONMENT]
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _ask(process: JobProcess, request: LookRequest) -> RankLook | str:
    if process.address is None:
        return "does not answer looks"
    try:
        with socket.socket(socket.AF_UNIX) as connection, short_path(process.address) as path:
            connection.settimeout(ANSWER_LIMIT)
            connection.connect(path)
            send(connection, request)
            answer: RankLook | LookFailed = receive(connection, RankLook | LookFailed)
            return answer if isinstance(answer, RankLook) else f"can't be looked at ({answer.why})"
    except TimeoutError:
        return "in a call that blocks Python"
    except OSError:
        return "has ended"
    except msgspec.MsgspecError:
        return "runs another version of nbdist"
