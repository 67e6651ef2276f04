"""How long an agent waits for a tool of `nbdist mcp`, by the protocol's own client on stdio; how large answers are."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import _tools

if TYPE_CHECKING:
    from testbed.agent_client import AgentClient

RANKS = 2
ROUNDS = 50
BUDGET = 5e-3
LINES = _tools.size(10_000, 1_000)  # of 100 bytes
FLOOD = f"for i in range({LINES}): print(f'{{i:099d}}')"


def main() -> None:
    _tools.prepare()
    from testbed.agent_client import AgentClient
    from testbed.kernel import kernel_with_ranks

    with contextlib.ExitStack() as stack:
        notebook = stack.enter_context(kernel_with_ranks(RANKS))
        name = notebook.value("__import__('nbdist').get_session().name")
        agents = {
            "a notebook's ranks": stack.enter_context(AgentClient(session=name)),
            "ranks of its own": stack.enter_context(AgentClient()),
        }
        agents["ranks of its own"].session = agents["ranks of its own"].call("start", ranks=RANKS)["session"]["session"]
        for whose, agent in agents.items():
            measure(whose, agent)


def measure(whose: str, agent: AgentClient) -> None:
    """Call each tool in turn, beside idle ranks."""
    sizes: dict[str, list[int]] = {}
    flood = agent.run(FLOOD)["cell"]
    since = 0

    def timed(tool: str, **arguments: Any) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        answer = agent.result(tool, **arguments)
        seconds = time.perf_counter() - began
        assert not answer.is_error and answer.structured_content is not None, answer
        sizes.setdefault(tool, []).append(len(answer.model_dump_json(exclude_none=True)))
        return seconds, answer.structured_content

    def run() -> float:
        seconds, news = timed("run", code="None")
        agent.finish(news["cell"])
        return seconds

    def page() -> float:
        nonlocal since
        seconds, news = timed("cell", cell=flood, since=since)
        since = news["next"] if news["left"] else 0
        return seconds

    last = agent.run("None")["cell"]
    measures = {
        "run, which returns at once": run,
        "cell": lambda: timed("cell", cell=last)[0],
        "status": lambda: timed("status")[0],
        "a page of 8,000 characters of 1 MB": page,
    }
    samples = _tools.rounds(ROUNDS, measures, warm_up=3)
    _tools.header(f"an agent's calls, {whose}")
    for what, each in samples.items():
        _tools.row(what, each, **_tools.limit(BUDGET))
    print(f"bytes of the largest answer: {', '.join(f'{tool} {max(each):,.0f}' for tool, each in sizes.items())}")


if __name__ == "__main__":
    main()
