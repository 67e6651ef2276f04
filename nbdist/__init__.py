"""One notebook, every GPU: cells that run on all ranks of a distributed PyTorch job."""

# General layout
#   client/       inside the notebook kernel: sessions, magics, what is shown
#   controller/   one process per session: routes, knows who lives, keeps the output log
#   agent/        one process per node: the warm template, the ranks' processes and pipes
#   worker/       inside a rank: shell, control thread, process group
#   launch/       a function on ranks of its own, behind launcher.py: notebook_launcher, debug_launcher
#   export/       a notebook as a script; program/: scripts and notebooks from beginning to end
#   saving/       a session on the disk; serving/, jobs/: a look into a job that others have started
#   panel/        what ranks cost, live in the notebook; its page side is in labextension/
#   plan.py       how models are made distributed; planning/: its rules, words and variables
#   train/        what training code on a rank calls; works under torchrun, too
#   metrics/      what cells, steps and machines cost; works in any process
#   wire/         every message between these processes; transfer/: how values travel
#   base/         what all of them use: text, checks, limits, processes, addresses
#   cluster/      how other machines become nodes
#   lab/          what JupyterLab's pages reach in a kernel; server/: in the Jupyter server
#   errands/      what agents want from this process's session; mcp_server/: an agent's server
#   shells.py     what IPython shells keep alive, in the notebook and on ranks
#   errors.py     the error tree; cuda_guard.py: who initialized CUDA in the notebook
# The roles share only base/ and the modules at the top. Importing nbdist loads neither torch nor ipywidgets.

from __future__ import annotations

import functools
import importlib
from typing import Any

from nbdist._version import __version__ as __version__

_FOR_IPYTHON = "load_ipython_extension"  # a name that nobody types


@functools.cache
def _sources() -> dict[str, str]:
    """Return the module of each public name, as `__init__.pyi` has it."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def __dir__() -> list[str]:
    return sorted({*globals(), *_sources()} - {_FOR_IPYTHON})


def __getattr__(name: str) -> Any:
    # Nothing is kept here: some names, such as `device`, are values that change.
    if name == "__all__":
        return sorted(_sources().keys() - {_FOR_IPYTHON})
    source = None if name.startswith("_") else _sources().get(name)
    if source is None:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    if not source:
        return _imported(f"nbdist.{name}")
    return getattr(_imported(f"nbdist.{source}"), name)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        from nbdist.base.requirements import explained

        raise explained(error) from error
