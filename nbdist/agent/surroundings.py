"""What ranks find on a node that is not the notebook's: its own environment, folders and GPUs, and what the user set.

Independent of processes.
"""

from __future__ import annotations

import os
import resource
import sys

import msgspec

from nbdist.devices import nccl_variables, visible_gpus
from nbdist.wire.messages.healing import Respawn
from nbdist.wire.messages.life import StartOptions
from nbdist.wire.processes.nodes import TOKEN_VARIABLE

# What the notebook's machine, its login or its job manager has set, and means nothing elsewhere.
_OF_A_MACHINE = (
    {"DISPLAY", "HOST", "HOSTNAME", "MASTER_ADDR", "MASTER_PORT", "PATH", "PWD", "OLDPWD", "VIRTUAL_ENV", "_"}
    | {"HOME", "LOGNAME", "MAIL", "SHELL", "SHLVL", "TEMP", "TERM", "TMP", "TMPDIR", "USER"}
    | {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
)
_PREFIXES_OF_A_MACHINE = (
    *("DBUS_", "GLOO_", "JPY_", "JUPYTER", "LD_", "SSH_", "XDG_"),
    *("OMPI_", "PALS_", "PBS_", "PMI", "SLURM_"),
)


def here(options: StartOptions) -> tuple[StartOptions, list[str]]:
    """Complete the options for ranks of this node.

    Args:
        options: What the notebook asks for, without what is its machine's own.

    Returns:
        The options for this node, and what is to be said of them.
    """
    notes = []
    gpus = visible_gpus()[: options.count]
    changed = {name: value for name, value in options.changed.items() if not _is_of_a_machine(name)}
    own = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    links = nccl_variables() if len(gpus) > 1 else {}
    cwd = options.cwd
    if not os.path.isdir(cwd):
        cwd = os.path.expanduser("~")
        notes.append(f"it has no folder {options.cwd}, so its ranks work in {cwd}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = [entry for entry in options.own_path if os.path.exists(os.path.join(cwd, entry))]
    whole = msgspec.structs.replace(
        options,
        environment={**own, **changed, **links},
        cwd=cwd,
        sys_path=[*there, *(entry for entry in sys.path if entry not in there)],
        gpus=gpus or None,
        open_files=hard,
        umask=_umask(),
    )
    return whole, notes


def with_gpus(message: Respawn, options: StartOptions) -> Respawn:
    """Name the GPUs that a newcomer's machine has for its ranks, of which there may be more than at the start.

    Args:
        options: Of the start.
    """
    post = message.post
    needed = max(post.count, post.gpu + 1, len(options.gpus or []))
    return msgspec.structs.replace(message, post=msgspec.structs.replace(post, gpus=visible_gpus()[:needed] or None))


def _is_of_a_machine(name: str) -> bool:
    return name in _OF_A_MACHINE or name.startswith(_PREFIXES_OF_A_MACHINE)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
