"""Ranks that wait in a collective for ranks that will never come are freed, and everything they have goes on."""

from __future__ import annotations

import re

import pytest

from nbdist.base.ranks import parse_ranks
from testbed.kernel import Kernel, both, wait_until
from tests.support.spare import spare_with_ranks

SETUP = """%%distributed
import socket, time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
kept = ['state', rank]
world = dist.group.WORLD
pair = dist.new_group([0, 1])
x = torch.ones(1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
sharded = fully_shard(torch.nn.Linear(4, 4))
"""

# Each leaves at least one rank waiting for ever; the function that it waits in, or a part of its name.
STUCK = {
    "one_absent": ("if rank: dist.all_reduce(x.clone())", "all_reduce"),
    "different_collectives": (
        "dist.all_reduce(x.clone()) if rank else dist.all_gather([x, x], x)",
        "all_gather",
    ),
    "all_waiting_for_each_other": ("dist.recv(x.clone(), 1 - rank)", "recv"),
    "an_object_collective": ("if rank: dist.all_gather_object([None] * 2, rank)", "all_gather_object"),
    "a_barrier": ("if rank: dist.barrier()", "barrier"),
    "a_monitored_barrier": ("if not rank: dist.monitored_barrier()", "monitored_barrier"),
    "a_ddp_backward": ("if rank: model(torch.ones(2, 4)).sum().backward()", "backward"),
    "an_fsdp_all_gather": ("if rank: sharded(torch.ones(2, 4)).sum().backward()", "all_gather"),
    "a_send_too_many": ("dist.send(torch.ones(1 << 22), 1) if not rank else None", "send"),
    "a_sub_group": ("if rank: dist.all_reduce(x.clone(), group=pair)", "all_reduce"),
    "making_a_group": ("if rank: dist.new_group([0, 1])", "new_group"),
    "an_asynchronous_collective": ("if rank: dist.all_reduce(x.clone(), async_op=True).wait()", "work.wait"),
}


def stick(kernel: Kernel, code: str, function: str) -> None:
    """Run code in the background until a rank waits in the function."""
    kernel.ok(
        f"import nbdist\nsession = nbdist.get_session()\nhandle = session.run_in_background({code!r}, show=False)"
    )
    look = "[row['doing'] for row in session.status()]"
    expected = re.escape(code.splitlines()[-1][:30]) if function == "work.wait" else rf"\(in \w*{function}"
    wait_until(lambda: any(re.search(expected, line) for line in kernel.value(look)), f"a rank in {function}")


def free(kernel: Kernel) -> str:
    """Stop the background cell at once. Returns the last line of what it says."""
    kernel.ok("handle.interrupt(now=True)")
    outcome = kernel.run("handle.wait(20)")
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    return outcome.traceback.splitlines()[-1]


def printed_by(stdout: str, word: str, count: int = 2) -> set[int]:
    """The ranks that have printed a line."""
    return {rank for who in re.findall(rf"^\[([\d,-]+)\] {word}$", stdout, re.M) for rank in parse_ranks(who, count)}


def all_is_well(kernel: Kernel) -> None:
    """Variables are kept, and every group gives the right sum."""
    seen = kernel.ok(
        "%%distributed\n"
        "y = torch.ones(1)\n"
        "for group in (None, world, pair): dist.all_reduce(y, group=group)\n"
        "assert functional.all_reduce(torch.ones(1), 'sum', pair).item() == 2\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "sharded(torch.ones(2, 4)).sum().backward()\n"
        "print(kept[0], int(y), model.module.weight.grad.tolist())"
    )
    assert "state 8 [[2.0, 2.0, 2.0, 2.0]]" in seen.stdout


@pytest.mark.torch_private
@pytest.mark.parametrize("what", STUCK)
def test_a_rank_is_freed_from(what: str, ranks: Kernel) -> None:
    ranks.ok(SETUP)
    stick(ranks, *STUCK[what])
    assert "process groups rebuilt (generation" in free(ranks)
    all_is_well(ranks)


@pytest.mark.torch_private
def test_one_interrupt_frees_ranks_that_wait_for_each_other(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    cell = ranks.start("%%distributed\nprint('go')\ndist.recv(x.clone(), 1 - rank)")
    cell.wait_until(lambda seen: printed_by(seen.stdout, "go") == {0, 1})
    ranks.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    assert "nbdist: process groups rebuilt" in outcome.traceback
    all_is_well(ranks)


@pytest.mark.torch_private
def test_a_second_interrupt_frees_them_at_once(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    cell = ranks.start("%%distributed\nprint('go')\ndist.recv(x.clone(), 1 - rank)")
    cell.wait_until(lambda seen: printed_by(seen.stdout, "go") == {0, 1})
    ranks.interrupt()
    cell.wait_for("Interrupt again to stop them now")
    ranks.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    all_is_well(ranks)


@pytest.mark.torch_private
def test_after_a_cell_that_has_caught_what_freed_it_the_next_sum_is_right(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    stick(
        ranks, "try:\n    if rank: dist.all_reduce(x.clone())\nexcept BaseException:\n    print('caught')", "all_reduce"
    )
    ranks.ok("handle.interrupt(now=True)\nhandle.wait(20)")
    assert ranks.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())").lines == both("2.0")


def test_ranks_that_wait_for_one_that_has_raised_are_freed_and_its_error_is_shown(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    outcome = ranks.run("%%distributed\nif rank == 1: raise KeyError('first')\ndist.all_reduce(x.clone())")
    assert outcome.evalue == "rank 1 raised KeyError: 'first'"
    assert "rank 0: interrupted, because rank 1 failed" in outcome.traceback
    assert "nbdist: process groups rebuilt" in outcome.traceback.splitlines()[-1]
    all_is_well(ranks)


@pytest.mark.torch_private
def test_a_rank_that_works_on_while_another_has_raised_is_left_alone(ranks: Kernel) -> None:
    """It waits in no collective, so the grace does not end it."""
    outcome = ranks.run(
        "%%distributed --grace 0.2\nimport time\nif rank == 1: raise KeyError('first')\n"
        "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: time.sleep(0.01)\nprint('done')"
    )
    assert outcome.ename == "RankError"
    assert outcome.stdout == "[0] done\n"
    assert "rank 0: finished" in outcome.traceback


@pytest.mark.torch_private
def test_a_rank_one_collective_ahead_does_not_make_the_next_sum_wrong(ranks: Kernel) -> None:
    """Without the comparison after a failed cell the next all_reduce of ones gives 101."""
    ranks.ok(SETUP)
    outcome = ranks.run(
        "%%distributed\nif rank == 0: work = dist.all_reduce(torch.full((1,), 100.0), async_op=True)\nraise KeyError(1)"
    )
    assert outcome.ename == "RankError"
    assert "nbdist: process groups rebuilt" in outcome.traceback
    assert ranks.ok("%%rank 0\ny = torch.ones(1)").stdout == ""
    seen = ranks.ok("%%distributed\ny = torch.ones(1)\ndist.all_reduce(y)\nprint(int(y))")
    assert "2" in seen.stdout and "101" not in seen.stdout


def test_after_a_failure_with_nothing_amiss_nothing_is_said_or_rebuilt(ranks: Kernel) -> None:
    before = ranks.value("__import__('nbdist').get_session().status()[0]['generation']")
    outcome = ranks.run("%%distributed\nimport torch, torch.distributed as dist\ndist.barrier()\n1/0")
    assert outcome.ename == "RankError"
    assert "nbdist:" not in outcome.traceback
    assert ranks.value("nbdist.get_session().status()[0]['generation']") == before


@pytest.mark.torch_private
def test_what_the_user_has_open_outlives_an_abort(own_ranks: Kernel) -> None:
    """A connection, a session of requests' kind, a store and an event loop of the user's own."""
    kernel = own_ranks
    kernel.ok(SETUP)
    kernel.ok(
        "%%distributed\n"
        "import asyncio, http.client, http.server, socket, threading\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', '2'); self.end_headers()\n"
        "        self.wfile.write(b'ok')\n"
        "    def log_message(self, *arguments): pass\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "ports = [None, None]\n"
        "dist.all_gather_object(ports, server.server_address[1])\n"
        "web = http.client.HTTPConnection('127.0.0.1', ports[1 - rank])  # from rank to rank, and kept alive\n"
        "web.request('GET', '/'); web.getresponse().read(); kept_socket = web.sock\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) if rank == 0 else None\n"
        "port = [store.port if rank == 0 else 0]\n"
        "dist.broadcast_object_list(port, 0)\n"
        "store = store or dist.TCPStore('127.0.0.1', port[0], is_master=False)\n"
        "store.set(f'from {rank}', 'x')\n"
    )
    stick(kernel, *STUCK["all_waiting_for_each_other"])
    assert "process groups rebuilt" in free(kernel)
    kernel.ok(
        "%%distributed\n"
        "web.request('GET', '/'); assert web.getresponse().read() == b'ok' and web.sock is kept_socket\n"
        "assert store.get(f'from {1 - rank}') == b'x'"
    )
    stick(kernel, *STUCK["making_a_group"])
    free(kernel)
    kernel.ok("%%distributed\nassert store.get(f'from {1 - rank}') == b'x'")
    all_is_well(kernel)


@pytest.mark.torch_private
def test_a_group_of_the_user_s_own_making_is_freed_and_can_be_made_again() -> None:
    with spare_with_ranks(2, "--no-init") as kernel:
        kernel.ok("%%distributed\nimport torch, torch.distributed as dist")
        stick(kernel, "if rank: dist.init_process_group('gloo')", "_process_group")
        free(kernel)
        seen = kernel.ok(
            "%%distributed\n"
            "dist.init_process_group('gloo')\ny = torch.ones(1)\ndist.all_reduce(y)\nassert int(y) == 2\n"
            "group = dist.new_group([0, 1])\ndist.all_reduce(y, group=group)\nassert int(y) == 4"
        )
        assert seen.status == "ok"


@pytest.mark.torch_private
def test_a_rank_is_freed_that_waits_to_be_connected_to(ranks: Kernel) -> None:
    ranks.ok(SETUP)
    ranks.ok(
        "%%distributed\n"
        "def make(**options):\n"
        "    for _ in range(6):\n"
        "        try: dist.new_group([0, 1], **options)\n"
        "        except RuntimeError: pass"
    )
    # Rank 1 says where it listens, and gives up. Which of the two is to connect to the other is chance.
    ranks.ok("%%rank 1\nfrom datetime import timedelta\nmake(timeout=timedelta(seconds=0.1))")
    stick(ranks, "if not rank: make()", "new_group")
    free(ranks)
    all_is_well(ranks)


@pytest.mark.torch_private
def test_after_a_death_a_group_of_the_living_works_and_the_old_one_says_why_not() -> None:
    with spare_with_ranks(3) as kernel:
        kernel.ok("%%distributed\nimport os, torch, torch.distributed as dist\npair = dist.new_group([0, 1])")
        kernel.fails("%%distributed\nif rank == 2: os._exit(3)\ndist.barrier()", "RankDied")
        outcome = kernel.fails("%%distributed -r 0-1\ndist.all_reduce(torch.ones(1))", "RankError")
        assert "StaleGroupError" in outcome.evalue and "rank 2" in outcome.evalue
        assert "use_local_synchronization=True" in outcome.evalue
        kernel.ok(
            "%%distributed -r 0-1\ny = torch.ones(1)\ndist.all_reduce(y, group=pair)\nassert int(y) == 2\n"
            "living = dist.new_group([0, 1], use_local_synchronization=True)\n"
            "dist.all_reduce(y, group=living)\nassert int(y) == 4"
        )


@pytest.mark.torch_private
def test_a_group_that_only_some_ranks_have_is_dropped_and_says_so(own_ranks: Kernel) -> None:
    kernel = own_ranks
    kernel.ok(SETUP)
    outcome = kernel.run("%%distributed\nif rank: dist.destroy_process_group(pair)\n1/0")
    assert "create them again" in outcome.traceback.splitlines()[-1]
    stale = kernel.fails("%%rank 0\ndist.all_reduce(x, group=pair)", "RankError")
    assert "StaleGroupError" in stale.evalue and "dist.new_group" in stale.evalue
