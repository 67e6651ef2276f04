"""How long until ranks on GPUs are there again, with their CUDA context, and until their first collective is done."""

from __future__ import annotations

import _tools

ROUNDS = 5


def main() -> None:
    device = _tools.gpu()
    _tools.prepare()
    from nbdist.client.session.session import Session

    count = _tools.ranks_for_gpus()
    with Session(count) as session:
        first = f"import torch\nones = torch.ones(1, device={device!r})\nones.sum().item()"
        exchange = "import torch.distributed as dist\ndist.all_reduce(ones)\nones.sum().item()"
        samples = _tools.rounds(
            ROUNDS,
            {
                "restart": _tools.timed(session.restart),
                "context": _tools.timed(lambda: session.run(first)),
                "exchange": _tools.timed(lambda: session.run(exchange)),
                "cell": _tools.timed(lambda: session.run("pass")),
            },
        )
        backend = session.backend
    _tools.header(f"{count} ranks, {backend}")
    _tools.row("restart, from a warm template", samples["restart"])
    _tools.row("first tensor on the GPU: context and first kernel", samples["context"])
    _tools.row("first collective", samples["exchange"])
    _tools.row("an empty cell", samples["cell"], **_tools.limit(0.0012 if count == 2 else 0.004))


if __name__ == "__main__":
    main()
