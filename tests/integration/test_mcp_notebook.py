"""An agent and a person share the ranks of a notebook: both see who runs what, and nobody is in the other's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed.agent_client import AgentClient
from testbed.kernel import Kernel, both, kernel_with_ranks

SLEEP = "%%distributed\nimport time\nprint('at it')\ntime.sleep(600)"


@pytest.fixture
def agent(own_ranks: Kernel) -> Iterator[AgentClient]:
    """An agent beside a notebook with two ranks."""
    with AgentClient(name="helper", session=name_of(own_ranks)) as client:
        yield client


def name_of(kernel: Kernel) -> str:
    """The name of a notebook's session."""
    return str(kernel.value("__import__('nbdist').get_session().name"))


def test_an_agent_uses_the_notebook_s_variables_and_the_notebook_shows_its_cells(
    own_ranks: Kernel, agent: AgentClient
) -> None:
    own_ranks.ok("%%distributed\nx = 5 + rank")
    last = own_ranks.start("'below this'")
    last.finish()
    ran = agent.run("x += 1\nprint('x is', x)")
    assert ran["by"] == "agent helper" and sorted(ran["output"].splitlines()) == ["[0] x is 6", "[1] x is 7"]
    last.wait_late("x is 7")
    assert f"agent helper runs cell {ran['cell']} on ranks 0-1:\n    x += 1\n    print" in last.outcome.stderr
    assert own_ranks.ok("%%distributed\nprint(x)").lines == {0: ["6"], 1: ["7"]}
    (found,) = [each for each in agent.call("sessions")["sessions"] if each["session"] == agent.session]
    assert found["ranks"] == 2 and found["driven_by"] == f"pid {own_ranks.pid}" and not found["own"]


def test_the_notebook_shows_what_failed(own_ranks: Kernel, agent: AgentClient) -> None:
    last = own_ranks.start("'below this'")
    last.finish()
    failed = agent.run("if rank == 1: raise ValueError('of the agent')")
    assert failed["state"] == "failed" and failed["failed_rank"] == 1
    last.wait_late("rank 1 raised ValueError: of the agent")


def test_an_agent_sees_the_user_s_cell_waits_for_it_and_stops_it(own_ranks: Kernel, agent: AgentClient) -> None:
    agent.run("pass")
    cell = own_ranks.start(SLEEP)
    cell.wait_for_ranks(2, "at it")
    (running,) = [each for each in agent.call("status")["cells"] if each["state"] == "running"]
    assert running["by"] == "notebook" and running["ranks"] == "0-1"
    news = agent.call("cell", cell=running["cell"])
    assert news["output"] == "[0-1] at it\n" and news["code"] == "import time"
    waiting = agent.call("run", code="print('my turn')")
    assert waiting["state"] == "queued" and f"cell {running['cell']}" in waiting["note"]
    assert agent.call("interrupt", cell=running["cell"])["running"] == [running["cell"]]
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt" and "interrupted by agent helper" in outcome.stderr, str(outcome)
    assert agent.finish(waiting["cell"])["output"] == "[0-1] my turn\n"
    assert agent.call("cell", cell=running["cell"])["state"] == "interrupted"


def test_an_agent_answers_while_the_kernel_is_busy_itself(own_ranks: Kernel, agent: AgentClient) -> None:
    cell = own_ranks.start("import time\nprint('local')\ntime.sleep(600)")
    cell.wait_for("local")
    assert agent.run("rank", ranks="1")["values"] == {"1": "1"}
    own_ranks.interrupt()
    cell.finish()


def test_a_user_s_cell_is_refused_while_the_agent_s_runs_and_ctrl_c_stops_nothing_of_it(
    own_ranks: Kernel, agent: AgentClient
) -> None:
    busy = agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    assert f"still running cell {busy}" in own_ranks.fails("%%distributed\n1", "SessionBusy").evalue
    own_ranks.ok("%distributed interrupt")
    assert agent.finish(busy)["state"] == "interrupted"
    assert own_ranks.ok("%%distributed\nprint('free')").lines == both("free")


def test_cells_from_before_are_known_with_their_output(own_ranks: Kernel) -> None:
    own_ranks.ok("%%distributed\nprint('long ago')")
    number = own_ranks.value("get_ipython().history_manager.input_hist_raw.__len__()") - 1
    with AgentClient(session=name_of(own_ranks)) as agent:
        news = agent.call("cell", cell=number)
        assert news["output"] == "[0-1] long ago\n" and news["state"] == "ended" and news["by"] == "notebook"


def test_an_agent_that_leaves_ends_nothing_of_the_notebook_s(own_ranks: Kernel) -> None:
    with AgentClient(session=name_of(own_ranks)) as agent:
        busy = agent.call("run", code="import time\nprint('at it')\ntime.sleep(600)")["cell"]
        agent.await_cell(busy, lambda news: news["output"])
    with AgentClient(session=name_of(own_ranks)) as other:
        assert other.call("cell", cell=busy)["state"] == "running"
        other.call("interrupt")
        assert other.finish(busy)["state"] == "interrupted"


def test_two_agents_at_once_share_the_ranks(own_ranks: Kernel) -> None:
    session = name_of(own_ranks)
    with AgentClient(name="one", session=session) as one, AgentClient(name="two", session=session) as two:
        first = [one.call("run", code=f"print('one', {i})")["cell"] for i in range(10)]
        second = [two.call("run", code=f"print('two', {i})")["cell"] for i in range(10)]
        assert len({*first, *second}) == 20
        for agent, name, cells in ((one, "one", first), (two, "two", second)):
            for i, cell in enumerate(cells):
                news = agent.finish(cell)
                assert news["output"] == f"[0-1] {name} {i}\n" and news["by"] == f"agent {name}"
        assert two.call("cell", cell=first[0])["by"] == "agent one"


def test_an_agent_uses_the_ranks_that_another_agent_s_server_has_started() -> None:
    with AgentClient(name="one") as one, AgentClient(name="two") as two:
        name = one.call("start", ranks=2)["session"]["session"]
        one.run("x = 3")
        two.session = name[:5]
        assert two.run("x")["values"] == {"0-1": "3"}
        busy = two.call("run", code="import time\ntime.sleep(600)")["cell"]
        assert one.call("interrupt")["running"] == [busy]
        assert two.finish(busy)["state"] == "interrupted"
        one.call("stop")
        assert "session" in two.fails("run", code="1")


def test_a_read_only_server_sees_the_notebook_s_cells(own_ranks: Kernel) -> None:
    session = name_of(own_ranks)
    cell = own_ranks.start(SLEEP)
    cell.wait_for_ranks(2, "at it")
    with AgentClient("--read-only", session=session) as agent:
        (running,) = agent.call("status")["cells"]
        assert agent.call("cell", cell=running["cell"])["output"] == "[0-1] at it\n"
        assert "time.sleep(600)" in agent.call("stacks")["text"]
        assert "run" not in agent.tools()
    own_ranks.interrupt()
    cell.finish()


def test_a_session_that_the_user_stops_is_told(own_ranks: Kernel, agent: AgentClient) -> None:
    busy = agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    own_ranks.ok("%distributed stop")
    assert "session" in agent.fails("cell", cell=busy)
    own_ranks.ok("%distributed start -n 2")
    agent.session = name_of(own_ranks)
    assert agent.run("rank", ranks="0")["values"] == {"0": "0"}


def test_an_agent_that_stops_the_session_says_so_in_the_notebook(own_ranks: Kernel, agent: AgentClient) -> None:
    last = own_ranks.start("%%distributed\nprint('there')")
    last.finish()
    assert "2 ranks of session" in agent.call("stop")["text"]
    last.wait_late("the session was stopped by agent helper")
    own_ranks.fails("%%distributed\n1", "SessionClosed")
    own_ranks.ok("%distributed start -n 2")


def test_a_notebook_that_leaves_is_told_and_serves_again_when_it_is_back(own_ranks: Kernel, agent: AgentClient) -> None:
    busy = agent.call("run", code="import time\nprint('at it')\ntime.sleep(600)")["cell"]
    agent.await_cell(busy, lambda news: news["output"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agent.fails, "cell", cell=busy, wait=30)
        own_ranks.ok("%distributed detach --linger 60s")
        text = waiting.result(20)
    assert "the client that drives this session has left it" in text or "no notebook drives session" in text
    assert "no notebook drives session" in agent.fails("status")
    own_ranks.ok("%distributed attach")
    assert agent.call("interrupt")["running"] == [busy]
    assert agent.finish(busy)["state"] == "interrupted"


def test_ranks_that_are_restarted_lose_the_agent_s_cells(own_ranks: Kernel, agent: AgentClient) -> None:
    busy = agent.call("run", code="import time\ntime.sleep(600)")["cell"]
    queued = agent.call("run", code="print('on the old ranks')")["cell"]
    own_ranks.ok("%distributed restart")
    lost = agent.finish(busy)
    assert lost["state"] == "lost" and "the ranks were restarted" in lost["failure"]
    assert agent.finish(queued)["state"] == "lost" and agent.call("cell", cell=queued)["output"] == ""
    assert agent.run("print('on new ranks')")["output"] == "[0-1] on new ranks\n"


@pytest.mark.slow
def test_a_kernel_that_hangs_is_told(own_ranks: Kernel, agent: AgentClient) -> None:
    agent.run("1")
    os.kill(own_ranks.pid, signal.SIGSTOP)
    try:
        assert "did not answer within 10 s" in agent.fails("status")
    finally:
        os.kill(own_ranks.pid, signal.SIGCONT)
    assert agent.run("rank", ranks="0")["values"] == {"0": "0"}


def test_after_a_crash_of_the_kernel_an_agent_takes_over_only_if_it_says_so() -> None:
    with kernel_with_ranks(2, "--linger 60") as kernel, AgentClient() as agent:
        kernel.ok("%%distributed\nx = 8")
        agent.session = name_of(kernel)
        assert agent.run("x")["values"] == {"0-1": "8"}
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.process.wait()
        assert "`attach` with session=" in agent.fails("run", code="x")
        agent.call("attach")
        assert agent.run("x")["values"] == {"0-1": "8"}
        agent.call("stop")


def test_a_notebook_takes_an_agent_s_session_and_the_agent_goes_on_in_it(notebook: Kernel) -> None:
    with AgentClient() as agent:
        name = agent.call("start", ranks=2)["session"]["session"]
        agent.run("x = 4")
        notebook.ok("%load_ext nbdist")
        notebook.ok(f"%distributed attach {name} --take")
        agent.session = name
        assert notebook.ok("%%distributed\nprint(x)").lines == both("4")
        assert agent.run("x + 1")["values"] == {"0-1": "5"}
        notebook.ok("%distributed stop")


def test_a_session_that_a_script_drives_refuses_agents() -> None:
    code = "import nbdist, sys\nwith nbdist.Session(2) as session: print(session.name, flush=True), sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdin is not None and script.stdout is not None
        with AgentClient(session=script.stdout.readline().strip()) as agent:
            assert f"driven by a script (pid {script.pid})" in agent.fails("run", code="1")
            assert "use it as it is, without `attach`" in agent.fails("attach")
        script.stdin.close()
