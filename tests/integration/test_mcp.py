"""`nbdist mcp`: what an agent does with ranks of its own, by the protocol's own client over stdio."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.agent_client import AgentClient, text_of
from testbed.kernel import wait_until
from tests.conftest import sharing

LOOKING = {"sessions", "cell", "status", "stacks", "flight", "memory", "why", "variables", "logs"}
ACTING = {"start", "attach", "detach", "run", "interrupt", "save", "heal", "stop"}
STUCK = """
import torch, torch.distributed as dist
if rank == 1:
    dist.all_reduce(torch.ones(1))
else:
    import time
    time.sleep(600)
"""


class Server:
    """The process of a server, for the fixture that looks for what is left behind."""

    def __init__(self, agent: AgentClient) -> None:
        found = [process for process in psutil.Process().children() if "mcp" in process.cmdline()]
        self.agent, self.pid = agent, max(process.pid for process in found)


@pytest.fixture
def agent(shared_agent: AgentClient) -> Iterator[AgentClient]:
    """An agent with two idle ranks of its own."""
    yield shared_agent
    while shared_agent.call("interrupt", now=True)["running"]:  # what a failed test has left
        pass


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[AgentClient]:
    """The same, shared by the tests of this module."""
    with AgentClient() as client, sharing(Server(client)):
        started = client.call("start", ranks=2)
        assert [rank["state"] for rank in started["session"]["ranks"]] == ["idle", "idle"]
        yield client


@pytest.fixture
def no_sessions(tmp_path: Path) -> dict[str, str]:
    """Variables of a server that sees no session of other tests."""
    return {"JUPYTER_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def own_agent(no_sessions: dict[str, str]) -> Iterator[AgentClient]:
    """An agent without ranks, of a test's own."""
    with AgentClient(**no_sessions) as client:
        yield client


def test_tools_say_what_they_do_and_whether_they_change_anything(agent: AgentClient) -> None:
    tools = agent.tools()
    assert set(tools) == LOOKING | ACTING
    for name, tool in tools.items():
        assert tool.description and tool.annotations and tool.output_schema, name
        assert "\n  " not in tool.description, tool.description
        assert tool.annotations.read_only_hint == (name in LOOKING), name
        undescribed = [key for key, value in tool.input_schema["properties"].items() if not value.get("description")]
        assert undescribed == [], name
    hints = {name: tool.annotations.destructive_hint for name, tool in tools.items() if tool.annotations}
    assert hints["stop"] and hints["run"] and not hints["start"]


def test_a_cell_is_run_and_variables_stay(agent: AgentClient) -> None:
    began = agent.call("run", code="import time\ntime.sleep(0.3)\nx = 10 * rank\nprint('hello', world_size)\nx")
    assert began["state"] == "running" and began["output"] == "" and began["by"] == "agent tester"
    ended = agent.finish(began["cell"])
    assert ended["state"] == "done" and ended["output"] == "[0-1] hello 2\n" and ended["left"] == 0
    assert ended["values"] == {"0": "0", "1": "10"} and ended["ranks"] == "0-1" and ended["code"] == "import time"
    assert agent.run("x + 1", ranks="1")["values"] == {"1": "11"}


def test_output_comes_as_the_cell_runs_and_once(agent: AgentClient, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"import os, time\nprint('one')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('two')"
    cell = agent.call("run", code=code)["cell"]
    first = agent.await_cell(cell, lambda news: news["output"] == "[0-1] one\n")
    assert first["state"] == "running"
    go.touch()
    agent.finish(cell)
    rest = agent.call("cell", cell=cell, since=first["next"])
    assert rest["output"] == "[0-1] two\n" and rest["state"] == "done"
    assert agent.call("cell", cell=cell, since=rest["next"])["output"] == ""


def test_a_short_cell_has_ended_when_run_waits(agent: AgentClient) -> None:
    assert agent.call("run", code="print(rank)", wait=30)["output"] in ("[0] 0\n[1] 1\n", "[1] 1\n[0] 0\n")


def test_the_text_of_an_answer_says_the_same(agent: AgentClient) -> None:
    text = text_of(agent.result("run", code="print('seen')\nrank", wait=30))
    assert "done" in text and "[0-1] seen" in text and "value on ranks 1: 1" in text


def test_a_failure_names_the_rank_that_failed_first(agent: AgentClient) -> None:
    failed = agent.run("if rank == 1:\n    raise ValueError('a broken sample')")
    assert failed["state"] == "failed" and failed["failed_rank"] == 1 and failed["error"] == "ValueError"
    assert failed["failure"].startswith("rank 1 raised ValueError: a broken sample")
    assert "----> 2     raise ValueError('a broken sample')" in failed["failure"] and "\x1b" not in failed["failure"]
    assert "rank 0: finished" in failed["failure"]


def test_a_cell_that_is_no_python_fails_with_the_place(agent: AgentClient) -> None:
    failed = agent.run("for x in")
    assert failed["state"] == "failed" and failed["error"] == "SyntaxError" and "for x in" in failed["failure"]


def test_a_stuck_cell_says_who_waits_for_whom_and_is_stopped(agent: AgentClient) -> None:
    agent.run("kept = 5")
    cell = agent.call("run", code=STUCK)["cell"]
    stuck = agent.await_cell(cell, lambda news: news["waits"])
    assert stuck["state"] == "running"
    assert stuck["waits"] == {"1": f"waits in all_reduce, cell {cell} line 4, for rank 0"}
    status = agent.call("status")
    assert [rank["state"] for rank in status["ranks"]] == ["busy", "busy"] and status["cells"][0]["cell"] == cell
    assert "all_reduce" in agent.call("stacks")["text"] and "all_reduce" in agent.call("flight")["text"]
    assert agent.call("interrupt") == {"running": [cell], "queued": []}
    ended = agent.finish(cell)
    assert ended["state"] == "interrupted" and ended["waits"] == {}
    assert agent.run("kept")["values"] == {"0-1": "5"}
    assert agent.call("interrupt") == {"running": [], "queued": []}


def test_a_cell_waits_for_its_ranks(agent: AgentClient, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = agent.call("run", code=f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\ny = 1")
    second = agent.call("run", code="y += 1")
    third = agent.call("run", code="y += 10")
    dropped = agent.call("run", code="y += 100")
    assert [news["state"] for news in (first, second, third)] == ["running", "queued", "queued"]
    assert f"cell {first['cell']}" in second["note"]
    assert agent.call("interrupt", cell=dropped["cell"]) == {"running": [], "queued": [dropped["cell"]]}
    go.touch()
    assert agent.finish(third["cell"])["state"] == "done"
    assert agent.finish(dropped["cell"])["state"] == "interrupted"
    assert agent.run("y")["values"] == {"0-1": "12"}


def test_ranks_that_are_free_do_not_wait_for_others(agent: AgentClient) -> None:
    busy = agent.call("run", code="import time\ntime.sleep(600)", ranks="0")["cell"]
    assert agent.run("rank", ranks="1")["values"] == {"1": "1"}
    assert agent.call("cell", cell=busy)["state"] == "running"
    agent.call("interrupt", cell=busy)
    assert agent.finish(busy)["state"] == "interrupted"


def test_a_cell_that_takes_too_long_is_interrupted(agent: AgentClient) -> None:
    ended = agent.run("import time\ntime.sleep(600)", timeout=0.2)
    assert ended["state"] == "interrupted" and "not done after 0.2 s" in ended["note"]


def test_a_megabyte_comes_in_pages(agent: AgentClient) -> None:
    line = "x" * 99
    cell = agent.run(f"for i in range(10_000): print(f'{{i:05}} {line}'[:99])", ranks="0")["cell"]
    since, pages = 0, []
    while True:
        page = agent.call("cell", cell=cell, since=since)
        assert len(page["output"]) <= 8_000 and page["next"] == since + len(page["output"])
        pages.append(page["output"])
        since = page["next"]
        if not page["left"]:
            break
    expected = "".join(f"{i:05} {line}"[:99] + "\n" for i in range(10_000))
    assert "".join(pages).replace("[0] ", "") == expected
    assert len(pages) > 100
    last = agent.call("cell", cell=cell, since=-1)
    assert "".join(pages).endswith(last["output"]) and len(last["output"]) == 8_000
    found = agent.call("logs", cell=cell, words="00777 X")
    assert found["text"].startswith("[0] 00777 xxx") and found["left"] == 0
    assert agent.call("logs", cell=cell, rank=0)["left"] > 900_000


def test_the_output_of_one_rank(agent: AgentClient) -> None:
    cell = agent.run("print('of', rank)")["cell"]
    assert agent.call("cell", cell=cell, rank=1)["output"] == "[1] of 1\n"
    assert agent.call("logs", cell=cell, rank=1)["text"] == "[1] of 1\n"
    assert "of 0" in agent.call("logs")["text"]


def test_displays_are_text_at_the_end(agent: AgentClient) -> None:
    code = (
        "from IPython.display import HTML, display\ndisplay({'of': rank}, HTML('<b>x</b>'))\ndisplay('same')\nrank * 2"
    )
    ended = agent.run(code)
    assert ended["displays"] == [
        "[0] {'of': 0}",
        "[0-1] <IPython.core.display.HTML object>",
        "[0-1] 'same'",
        "[1] {'of': 1}",
    ]
    assert ended["values"] == {"0": "0", "1": "2"}
    many = agent.run("for i in range(30): display(i * 1000)")
    assert len(many["displays"]) == 11 and many["displays"][-1] == "… 20 more displays …"


def test_progress_bars_and_colors_are_plain_text(agent: AgentClient) -> None:
    code = "import sys\nfor i in range(3): sys.stdout.write(f'\\r{i}/3'); sys.stdout.flush()\n"
    code += "print('\\r\\x1b[31mdone\\x1b[0m')"
    output = agent.run(code)["output"]
    assert "\r" not in output and "\x1b" not in output and "done" in output


def test_variables_memory_and_steps(agent: AgentClient) -> None:
    agent.run("import torch\nw = torch.full((3,), float(rank))")
    assert "w" in agent.call("variables")["text"]
    assert "2 different values" in agent.call("variables", name="w")["text"]
    assert "no rank has a variable 'ww'; similar names: w" in agent.fails("variables", name="ww")
    assert "cpu" in agent.call("memory")["text"]
    assert "no cell has made training steps yet" in agent.call("why")["text"]
    step = "model = torch.nn.Linear(4, 4); o = torch.optim.SGD(model.parameters(), 0.1)\n"
    step += "for _ in range(5): model(torch.ones(2, 4)).sum().backward(); o.step()"
    assert agent.run(step)["state"] == "done"
    assert "work" in agent.call("why")["text"]
    held = agent.call("status", memory=True)["ranks"][0]["memory"]
    assert held > 1_000_000 and agent.call("status")["ranks"][0]["memory"] is None


def test_a_session_is_saved(agent: AgentClient, tmp_path: Path) -> None:
    agent.run("saved = 3")
    assert "saved" in agent.call("save", directory=str(tmp_path / "saves"))["text"]
    assert (tmp_path / "saves").is_dir()


def test_bad_input_is_one_clear_error(agent: AgentClient) -> None:
    before = agent.call("status")["cells"]
    assert "there is no cell 77 in this session" in agent.fails("cell", cell=77)
    assert "rank 7 did not run cell" in agent.fails("cell", cell=agent.run("1")["cell"], rank=7)
    assert "this session" in agent.fails("run", code="1", ranks="7")
    assert "ranks" in agent.fails("run", code="1", ranks="none")
    assert "there is no code to run" in agent.fails("run", code="  \n")
    assert "timeout" in agent.fails("run", code="1", timeout=-1)
    assert "there is no session 'nowhere'" in agent.fails("run", code="1", session="nowhere")
    assert "code" in agent.fails("run")
    assert "drives session" in agent.fails("start", ranks=2) and "`stop` or `detach`" in agent.fails("attach")
    assert len(agent.call("status")["cells"]) <= len(before) + 1


def test_cells_of_two_calls_at_once(agent: AgentClient) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        began = list(pool.map(lambda i: agent.call("run", code=f"{i} * 100"), range(8)))
        ended = list(pool.map(lambda news: agent.finish(news["cell"]), began))
    assert len({news["cell"] for news in began}) == 8
    assert [news["values"] for news in ended] == [{"0-1": str(i * 100)} for i in range(8)]


# --- the ends


def test_without_a_session_each_tool_says_what_to_do(own_agent: AgentClient) -> None:
    for tool, arguments in (("status", {}), ("run", {"code": "1"}), ("cell", {"cell": 1}), ("stop", {})):
        assert "there is no session on this machine: call `start`" in own_agent.fails(tool, **arguments)
    assert own_agent.call("sessions") == {"sessions": []}


def test_a_session_that_has_ended_says_so_and_another_can_start(own_agent: AgentClient) -> None:
    own_agent.call("start", ranks=2)
    busy = own_agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    assert "2 ranks of session" in own_agent.call("stop")["text"]
    assert "has ended: `start` starts another" in own_agent.fails("cell", cell=busy)
    assert "has ended: `start` starts another" in own_agent.fails("run", code="1")
    own_agent.call("start", ranks=2)
    assert own_agent.run("world_size")["values"] == {"0-1": "2"}


def test_a_rank_that_dies_is_told_and_replaced(own_agent: AgentClient) -> None:
    started = own_agent.call("start", ranks=2)["session"]
    cell = own_agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    os.kill(started["ranks"][1]["pid"], signal.SIGKILL)
    ended = own_agent.finish(cell)
    assert ended["state"] == "failed" and ended["failed_rank"] == 1 and ended["error"] == "SIGKILL"
    assert own_agent.call("status")["ranks"][1]["state"] == "dead"
    assert "rank 1 died" in own_agent.fails("run", code="1")
    assert own_agent.run("rank", ranks="0")["values"] == {"0": "0"}
    assert "rank 1 replaced" in own_agent.call("heal")["text"]
    assert own_agent.run("rank")["values"] == {"0": "0", "1": "1"}
    assert "rank 0" in own_agent.fails("heal", ranks="0")


def test_a_controller_that_dies_is_told(own_agent: AgentClient) -> None:
    (rank, _) = own_agent.call("start", ranks=2)["session"]["ranks"]
    cell = own_agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    _, agent, controller, *_ = psutil.Process(rank["pid"]).parents()
    assert "controller_boot" in " ".join(controller.cmdline()), (agent, controller)
    os.kill(controller.pid, signal.SIGKILL)
    wait_until(lambda: own_agent.result("cell", cell=cell).is_error, "the end of the session to be noticed")
    assert "the session's controller" in own_agent.fails("cell", cell=cell)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_server_and_its_ranks(number: signal.Signals) -> None:
    with AgentClient() as client:
        server = psutil.Process(Server(client).pid)
        client.call("start", ranks=2)
        client.call("run", code="import time\ntime.sleep(600)")
        processes = [server, *server.children(recursive=True)]
        assert len(processes) >= 5
        server.send_signal(number)
        wait_until(lambda: not any(each.is_running() for each in processes), f"the end of {processes}")


def test_ranks_that_are_kept_outlive_the_server_and_another_attaches(no_sessions: dict[str, str]) -> None:
    with AgentClient("--keep", **no_sessions) as client:
        name = client.call("start", ranks=2)["session"]["session"]
        client.run("kept = 7")
        cell = client.run("print('printed before')")["cell"]
    with AgentClient(**no_sessions) as other:
        found = other.call("sessions")["sessions"]
        assert [each["session"] for each in found] == [name] and "nobody (detached" in found[0]["driven_by"]
        assert f"`attach` with session='{name}'" in other.fails("run", code="kept")
        attached = other.call("attach", session=name[:4])
        assert attached["session"]["session"] == name and attached["notes"]
        assert other.run("kept")["values"] == {"0-1": "7"}
        assert other.call("cell", cell=cell)["output"] == "[0-1] printed before\n"
        assert other.run("1")["cell"] > cell
        other.call("stop")


def test_a_client_of_an_older_protocol_is_served() -> None:
    with AgentClient("--read-only", protocol="legacy", name="old") as client:
        assert "sessions" in client.call("sessions") and set(client.tools()) == LOOKING


def test_a_read_only_server_offers_only_tools_that_look() -> None:
    with AgentClient("--read-only") as client:
        assert set(client.tools()) == LOOKING
        assert "Unknown tool" in client.fails("run", code="1")


def test_without_mcp_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from nbdist.command import main; sys.exit(main(['mcp']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "pip install 'nbdist[mcp]'" in done.stderr and done.stderr.count("\n") == 1
