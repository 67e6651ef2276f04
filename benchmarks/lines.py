"""10,000 lines from each of 8 ranks in a real kernel: time, none lost, what goes over the wire."""

from __future__ import annotations

import functools
import time

import _tools

RANKS = _tools.size(8, 2)
LINES = _tools.size(10_000, 200)
ROUNDS = 7
BUDGET = 0.5

_PRINT = {
    "different": f"for i in range({LINES}):\n    print(f'rank {{rank}} step {{i}} loss {{i * 0.001:.4f}}')",
    "equal": f"for i in range({LINES}):\n    print(f'step {{i}} loss {{i * 0.001:.4f}}')",
}
# The same text as all ranks' different lines, printed by the notebook itself.
_LOCAL = (
    f"for i in range({LINES}):\n    for rank in range({RANKS}):\n"
    "        print(f'[{rank}] rank {rank} step {i} loss {i * 0.001:.4f}')"
)


def main() -> None:
    _tools.prepare()
    from testbed.kernel import Kernel, Outcome, kernel_with_ranks

    seen: dict[str, tuple[float, Outcome]] = {}

    def measure(kernel: Kernel, name: str, code: str) -> float:
        execution = kernel.start(code)
        began = time.perf_counter()
        execution.wait_until(lambda outcome: bool(outcome.stdout), "any text")
        first = time.perf_counter() - began
        outcome = execution.finish()
        assert outcome.status == "ok", str(outcome)
        firsts.setdefault(name, []).append(first)
        seen[name] = first, outcome
        return outcome.seconds

    firsts: dict[str, list[float]] = {}
    with kernel_with_ranks(RANKS) as kernel:
        codes = {name: f"%%distributed\n{code}" for name, code in _PRINT.items()} | {"local": _LOCAL}
        samples = _tools.rounds(
            ROUNDS,
            {name: functools.partial(measure, kernel, name, code) for name, code in codes.items()},
            warm_up=1,
        )
    _tools.header(f"{LINES:,} lines from each of {RANKS} ranks")
    _tools.row("the same text printed by a local cell", samples["local"])
    for name in _PRINT:
        _tools.row(f"{name} lines", samples[name], **_tools.limit(BUDGET))
        _tools.row("  over the local cell", samples[name], over=("a local cell", samples["local"]))
        _tools.row("  first text on the wire", firsts[name][1:], **_tools.limit(0.1))
        _count(name, seen[name][1])


def _count(name: str, outcome: object) -> None:
    """Compare what came with what was printed, line by line."""
    text: str = outcome.stdout  # type: ignore[attr-defined]
    printed, prefixes, missing = 0, 0, []
    found: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    for line in text.splitlines():
        prefix, _, rest = line.partition("] ")
        prefixes += len(prefix) + 2
        printed += len(rest) + 1
        for rank in _members(prefix[1:]):
            found[rank].append(rest)
    for rank, lines in found.items():
        expected = [f"step {i} loss {i * 0.001:.4f}" for i in range(LINES)]
        if name == "different":
            expected = [f"rank {rank} {line}" for line in expected]
        if lines != expected:
            missing.append(rank)
    total = sum(len(lines) for lines in found.values())
    messages = sum(kind == "stream" for kind, _ in outcome.events)  # type: ignore[attr-defined]
    print(
        f"  {total:,} of {RANKS * LINES:,} lines came"
        + (f", WRONG on ranks {missing}" if missing else ", each in its place")
        + f"; {len(text) / 1e6:.2f} MB on the wire"
        + f" = {printed / 1e6:.2f} printed + {prefixes / 1e6:.2f} prefixes, in {messages} messages"
    )


def _members(text: str) -> list[int]:
    from nbdist.base.ranks import parse_ranks

    return list(parse_ranks(text, RANKS))


if __name__ == "__main__":
    main()
