"""The options of a start: the session's settings, and the notebook's state at that moment."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from nbdist import shells
from nbdist.base import limits
from nbdist.base.checks import LONGEST
from nbdist.base.text import counted, split_commas
from nbdist.client.start.start_settings import START_SETTINGS, StartSettings
from nbdist.devices import nccl_variables, visible_gpus
from nbdist.errors import UsageError
from nbdist.wire.messages.life import PATIENCE_VARIABLE, SLACK_VARIABLE, RankSettings, StartOptions

_SAVE_GRACE = 25.0  # seconds after SIGTERM for a save; Slurm, Kubernetes and others leave 30
_TIMEOUT = 1800.0  # seconds, torch's own default
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # lets NCCL 2.30 or newer put several ranks on one GPU


def start_options(settings: StartSettings, count: int | None) -> StartOptions:
    """Return the start options.

    Args:
        settings: The session's.
        count: Number of ranks; None for one per GPU.

    Raises:
        UsageError: They can't be had on this machine.
    """
    gpus = _choose_gpus(settings.gpus)
    if count is None and not gpus:
        raise UsageError("this machine has no GPU, so give the number of ranks: `%distributed start -n 2`")
    if count is None:
        count = len(gpus)
    START_SETTINGS["num_processes"].check("num_processes", count)
    if settings.every is not None and settings.save is None:
        raise UsageError("`--every` needs a folder for the saves: add `--save DIR`")
    for_ranks = {name: getattr(settings, name) for name in RankSettings.__struct_fields__}
    for_ranks["gpus"] = gpus[:count] or None
    if settings.save is not None and not settings.end_grace:
        for_ranks["end_grace"] = _SAVE_GRACE
    for_ranks["timeout"] = _TIMEOUT if settings.timeout is None else float(settings.timeout)
    found = StartOptions(
        count=count,
        environment={**os.environ, **(nccl_variables() if len(gpus[:count]) > 1 else {})},
        cwd=_current_folder(),
        sys_path=list(sys.path),
        argv=_arguments(),
        umask=_umask(),
        open_files=_open_files(count),
        patience=_patience(),
        slack=_slack(),
        changed=_changed_variables(),
        own_path=_own_path(),
        **for_ranks,
    )
    _check_backend(found)
    return found


def _patience() -> float:
    """Return the seconds that a start may go without progress.

    Raises:
        UsageError: The environment variable holds something else.
    """
    seconds = _seconds_in(PATIENCE_VARIABLE, 120.0)
    if not 0 < seconds <= LONGEST:
        text = os.environ[PATIENCE_VARIABLE]
        raise UsageError(f"{PATIENCE_VARIABLE}={text!r} is not a number of seconds: set it to 600, for example")
    return seconds


def _slack() -> float:
    """Return the seconds that answers of ranks may take beyond their limits.

    Raises:
        UsageError: The environment variable holds something else.
    """
    seconds = _seconds_in(SLACK_VARIABLE, 0.0)
    if not 0 <= seconds <= limits.MOST_SLACK:
        text = os.environ[SLACK_VARIABLE]
        raise UsageError(
            f"{SLACK_VARIABLE}={text!r} is not 0 to {limits.MOST_SLACK:g} seconds: set it to 1, for example"
        )
    return seconds


def _seconds_in(variable: str, default: float) -> float:
    """Return the number in a variable of the environment; NaN if it holds something else."""
    try:
        return float(os.environ.get(variable) or default)
    except ValueError:
        return math.nan


def _choose_gpus(wanted: Sequence[int | str] | int | str | None) -> list[str]:
    visible = visible_gpus()
    if wanted is None:
        return visible
    chosen = []
    for name in split_commas(str(wanted)) if isinstance(wanted, (int, str)) else map(str, wanted):
        if name.isdigit() and int(name) < len(visible):
            chosen.append(visible[int(name)])
        elif name in visible:
            chosen.append(name)
        else:
            have = ", ".join(map(str, range(len(visible)))) or "none"
            raise UsageError(f"GPU {name} isn't on this machine: it has {have}. Choose others, or omit gpus")
    if len(set(chosen)) < len(chosen):
        raise UsageError("gpus names a GPU twice: name each once. If there are more ranks than GPUs, ranks share them")
    return chosen


def _check_backend(options: StartOptions) -> None:
    backend, count, gpus = options.backend, options.count, options.gpus or []
    if backend is None or "nccl" not in backend or (gpus and os.environ.get(SHARED_GPUS) == "1"):
        return
    if options.gpus_are_parts and count > 1:
        raise UsageError(
            "nccl takes the MIG instances of a GPU for the same GPU: `--backend gloo`, or "
            f"`%env {SHARED_GPUS}=1` first, with an NCCL that supports MIG"
        )
    if count > len(gpus):
        fewer = f", or `-n {len(gpus)}`" if gpus else ""
        shared = f", or `%env {SHARED_GPUS}=1` first, with NCCL 2.30 or newer" if gpus else ""
        raise UsageError(
            f"nccl needs a GPU for each rank, and there are {count} ranks for {counted(len(gpus), 'GPU')}: "
            f"`--backend gloo`{fewer}{shared}"
        )


def _arguments() -> list[str]:
    """Return `sys.argv` for ranks: the notebook's, without the kernel's own arguments, which scripts don't expect."""
    given = sys.argv[1:]
    if shells.current() is not None and given and sys.orig_argv[-len(given) :] == given:
        return sys.argv[:1]
    return list(sys.argv)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the notebook's current folder has been removed: change to one that exists (`%cd ~`) first"
        ) from None


def _open_files(count: int) -> int:
    """Return how many files a rank may open: as many as the notebook, and at least what its connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 40 + 6 * count
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{count} ranks need about {needed} file descriptors, but this system allows {hard} per process: type "
            f"`ulimit -n {max(4096, needed)}` in the shell before you start Jupyter, or ask for fewer ranks"
        )
    return soft if soft == resource.RLIM_INFINITY else max(soft, needed)


def _changed_variables() -> dict[str, str]:
    """Return the variables of the environment that were set since this process began."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # nobody may look: then nothing is known to have been set
        return {}
    before = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _own_path() -> list[str]:
    """Return the entries of `sys.path` that are not Python's own."""
    paths = sysconfig.get_paths()
    python = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [entry for entry in sys.path if not entry.startswith(python) and not entry.endswith(".zip")]


def _umask() -> int:
    with contextlib.suppress(OSError):  # no file handle is left: the start is about to fail with a better message
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
