"""What a session adds to a collective: PyTorch records it for `%distributed flight`, nbdist adds nothing itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import _tools

CALLS = 2000  # of one measurement
ROUNDS = 30
AT_MOST = 5.0  # µs

# Prints what one all_reduce of a group of one rank takes, for each line that it reads.
_PROCESS = """
import sys, tempfile, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from collective import seconds
torch.set_num_threads(1)
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{{file.name}}x", rank=0, world_size=1)
    for line in sys.stdin:
        print(seconds({calls}), flush=True)
"""


def main() -> None:
    _tools.prepare()
    import nbdist

    calls = _tools.size(CALLS, 20)
    with nbdist.Session(1) as session, _process(calls, "0") as bare, _process(calls, "2000") as recorded:
        session.run("import torch; torch.set_num_threads(1)")
        measures = {"bare": bare, "recorded": recorded, "rank": lambda: float(session.call(seconds, calls)[0])}
        samples = _tools.rounds(ROUNDS, measures, warm_up=3)
    _tools.header("processor time of an all_reduce, gloo, one rank, one number")
    _tools.row("plain PyTorch, its recorder off", samples["bare"])
    _tools.row("plain PyTorch", samples["recorded"], over=("the recorder off", samples["bare"]))
    _tools.row("on a rank", samples["rank"], over=("plain PyTorch", samples["recorded"]))
    added = [(mine - other) * 1e6 for mine, other in zip(samples["rank"], samples["recorded"], strict=True)]
    _tools.row("  more than plain PyTorch", added, "µs", **_tools.limit(AT_MOST))


def seconds(calls: int) -> float:
    """Processor time of one all_reduce, in all threads."""
    import time

    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    began = time.process_time()
    for _ in range(calls):
        dist.all_reduce(value)
    return (time.process_time() - began) / calls


@contextlib.contextmanager
def _process(calls: int, buffer: str) -> Iterator[_tools.Measure]:
    """A measure in a process without nbdist, whose recorder keeps so many collectives."""
    code = _PROCESS.format(folder=os.path.dirname(os.path.abspath(__file__)), calls=calls)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"TORCH_FR_BUFFER_SIZE": buffer, "TMPDIR": tempfile.gettempdir()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def measure() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    try:
        yield measure
    finally:
        stdin.close()
        process.wait(10)


if __name__ == "__main__":
    main()
