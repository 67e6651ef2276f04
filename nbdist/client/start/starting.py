"""What a start reports while it runs, and why it failed: text for people, and fields for code."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from nbdist.base.text import counted
from nbdist.devices import unusable_gpus
from nbdist.errors import SessionBroken
from nbdist.wire.messages.life import RankInfo, Stage, StartOptions
from nbdist.wire.processes.nodes import TOKEN_VARIABLE, Invited, NodesWanted


class StartLine(str):
    """A line of text from a start.

    Attributes:
        stage: What the start was doing; "note" for a note when it is done.
    """

    stage: Stage | Literal["note"]

    def __new__(cls, text: str, stage: Stage | Literal["note"] = "note") -> StartLine:
        """Create the line; a `str` takes its text here."""
        line = super().__new__(cls, text)
        line.stage = stage
        return line


class PortTaken(SessionBroken):
    """The port that was named for the rendezvous store is taken; no rank is left."""


def invitation(message: Invited, token_file: str) -> str:
    """Return what the user has to do for other nodes to come.

    Args:
        message: Where they come, and with which tokens.
        token_file: Where the tokens are written, a line for each; "": they are part of the text.
    """
    count = len(message.tokens)
    waits = f"waiting for {counted(count, 'more node')}"
    if message.instead_of:
        waits = f"waiting for {counted(count, 'machine')} to replace {', '.join(message.instead_of)} (Ctrl-C cancels)"
    if token_file:
        with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(f"{token}\n" for token in message.tokens)
        where = "on each of them, or as a job that srun, mpirun or torchrun starts there"
        command = f"nbdist join {message.address} --token-file {shlex.quote(token_file)}"
        return f"{waits}: run this {where}\n  {command}"
    lines = [f"  {TOKEN_VARIABLE}={token} nbdist join {message.address}" for token in message.tokens]
    where = "on the other machine" if len(lines) == 1 else "on the other machines, a different line on each"
    return "\n".join([f"{waits}: run this {where}", *lines])


@contextlib.contextmanager
def removed_afterwards(token_file: str) -> Iterator[None]:
    """Remove the file with the tokens, if there is one, which are void after the body."""
    try:
        yield
    finally:
        if token_file:
            Path(token_file).unlink(missing_ok=True)


def remark_on_devices(options: StartOptions, ranks: Sequence[RankInfo], backend: str) -> str:
    """Return a note on the devices that the ranks use; empty if nothing is unusual."""
    gpus = options.gpus or []
    if gpus and all(info.device == "cpu" for info in ranks):
        return "this PyTorch is built without CUDA, so the ranks use the CPU, not the GPUs"
    if options.gpus_are_parts and options.count > 1 and "nccl" not in backend:
        return f"nccl takes the MIG instances of a GPU for the same GPU, so the ranks' group uses {backend}"
    if gpus and len(gpus) < options.count:
        so = "" if "nccl" in backend else "so "  # it was requested
        return f"{options.count} ranks share {counted(len(gpus), 'GPU')}, {so}their group uses {backend}"
    if not gpus and (files := unusable_gpus(options.environment)):
        return (
            f"this machine has GPUs ({', '.join(files)}) that PyTorch can't use, so the ranks use the CPU. "
            "`!python -c 'import torch; torch.zeros(1).cuda()'` shows why"
        )
    return ""


def remark_on_tunnel(nodes: NodesWanted | None) -> str:
    """Return a note on what does not go through ssh; empty if nothing does."""
    if nodes is None or not nodes.listen:
        return ""
    uncovered = f"torch's store, gloo and NCCL still use the network of {nodes.address}, without encryption"
    return f"the session's own connections go through ssh; {uncovered}"
