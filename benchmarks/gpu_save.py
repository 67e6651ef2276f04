"""How long a save keeps ranks on a GPU from training: one that waits, an asynchronous one, and the step after it."""

from __future__ import annotations

import tempfile

import _tools

WIDTHS = (2048, 4096)  # 8 layers, AdamW: 0.4 and 1.6 GB of state, four times on the disk


def main() -> None:
    device = _tools.gpu()
    _tools.prepare()
    from nbdist.client.session.session import Session
    from testbed import gpu_programs as programs

    _tools.header("state of 8 layers and AdamW, fsdp, 2 ranks")
    with Session(2) as session:
        for width in WIDTHS if device == "cuda" else (64,):
            with tempfile.TemporaryDirectory() as folder:
                waited, behind, step = zip(*session.call(programs.saved_twice, folder, width), strict=True)
            print(f"{12 * 8 * width * width / 1e9:.1f} GB")
            _tools.row("  a save", waited)
            _tools.row("  an asynchronous save, until training goes on", behind, over=("a save", waited))
            _tools.row("  the step after it", step)


if __name__ == "__main__":
    main()
