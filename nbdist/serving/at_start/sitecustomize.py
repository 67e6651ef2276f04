"""Has a rank answer looks before its script begins, where `NBDIST_SERVE` asks for it: `nbdist env`.

Python imports this in each process, also in those that are no ranks: those do nothing here. It hides the environment's
own `sitecustomize`, so that one is imported here.
"""

from __future__ import annotations

import os
import sys


def _import_hidden() -> None:
    own = sys.modules.pop(__name__, None)
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        if own is not None:
            sys.modules.setdefault(__name__, own)


def _serve(wish: str) -> None:
    if not any(name.endswith(("RANK", "_PROCID")) for name in os.environ):  # all launchers set such a one
        return  # before anything is imported: this may be any Python
    from nbdist.cluster.launchers import rank_of_job
    from nbdist.serving.served_rank import serve

    place = rank_of_job(os.environ)
    launched = "RANK" in os.environ  # by torchrun and its like; srun sets variables for a shell and a notebook, too
    if place is None or (place.world_size == 1 and not launched) or "nbdist.worker.rank" in sys.orig_argv:
        return
    if launched:  # what a rank starts is none; a launcher that srun has started has no RANK
        del os.environ["NBDIST_SERVE"]
    serve(control=wish == "control")


if __name__ == "sitecustomize":
    _import_hidden()
    if os.environ.get("NBDIST_SERVE"):
        try:
            _serve(os.environ["NBDIST_SERVE"])
        except Exception as error:  # no look is worth a job
            print(f"nbdist: this process can't be looked into: {error}", file=sys.stderr)
