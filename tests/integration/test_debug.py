"""A debugger at what has failed on a rank: `%distributed debug`."""

from __future__ import annotations

import json
import re
import socket

from testbed.kernel import Kernel
from tests.support.cells import on_ranks

FAILS_ON_1 = """%%distributed
import torch, weakref
def scale(by):
    held = torch.ones(5)
    globals()['watched'] = weakref.ref(held)
    return held.tolist()[0] / by
if rank == 1:
    scale(0)
"""


def test_the_debugger_opens_at_the_rank_that_failed_and_the_next_cell_frees_its_frames(ranks: Kernel) -> None:
    ranks.fails(FAILS_ON_1, "RankError")
    ranks.ok("%distributed pull rank")
    for _ in range(2):  # the frames are there again and again
        cell = ranks.start("%distributed debug", input_allowed=True)
        for command in ("p f'{by = } {held.numel() = }'", "up", "quit"):
            assert cell.enter(command) == "[rank 1] ipdb> "
        outcome = cell.finish()
        assert outcome.status == "ok" and "rank 1 raised ZeroDivisionError: " in outcome.stdout
        assert "by = 0 held.numel() = 5" in outcome.stdout
    assert ranks.ok("%distributed pull watched() -r 1 --as held").status == "ok"
    assert ranks.value("held.numel()") == 5
    assert on_ranks(ranks, "watched() if rank else None") == []


def test_the_debugger_of_ipython_on_a_rank_names_the_one_that_works(ranks: Kernel) -> None:
    ranks.fails(FAILS_ON_1, "RankError")
    refused = ranks.fails("%%distributed -r 1\n%debug", "RankError").evalue
    assert "UsageError: %debug does not work on ranks" in refused and "`%distributed debug`" in refused


def test_an_interrupt_leaves_the_debugger_and_nothing_else(ranks: Kernel) -> None:
    ranks.fails(FAILS_ON_1, "RankError")
    for _ in range(2):
        cell = ranks.start("%distributed debug -r 1", input_allowed=True)
        cell.prompt()
        ranks.interrupt()
        assert cell.finish().status == "ok"


def test_without_anything_to_debug_it_says_what_there_is(ranks: Kernel) -> None:
    ranks.fails(FAILS_ON_1, "RankError")
    assert "input is not available" in ranks.fails("%distributed debug", "InteractionError").evalue
    on_ranks(ranks, "1")
    assert "the frames of ZeroDivisionError" in ranks.fails("%distributed debug", "UsageError").evalue
    assert "nothing has failed on rank 0" in ranks.fails("%distributed debug -r 0", "UsageError").evalue
    assert "opens on one rank" in ranks.fails("%distributed debug -r 0-1", "UsageError").evalue
    ranks.ok("%%distributed --background --capture handle -r 1\nimport time\nwhile True: time.sleep(0.01)")
    ranks.fails("%distributed debug -r 1", "SessionBusy")
    ranks.ok("%distributed interrupt --now")
    ranks.run("%%distributed -r 0\n1")


def test_debugpy_listens_on_loopback_and_ends_with_the_session(own_ranks: Kernel) -> None:
    shown = own_ranks.ok("%distributed debug --debugpy -r 1").stdout
    configuration = json.loads(shown[shown.index("{") :])
    assert configuration["connect"]["host"] == "127.0.0.1" and configuration["name"] == "nbdist rank 1"
    with socket.create_connection(("127.0.0.1", configuration["connect"]["port"]), timeout=20) as adapter:
        arguments = {"adapterID": "debugpy", "clientID": "test"}
        request = json.dumps({"seq": 1, "type": "request", "command": "initialize", "arguments": arguments})
        adapter.sendall(f"Content-Length: {len(request)}\r\n\r\n{request}".encode())
        received = ""
        while not re.search(r'"command": ?"initialize"', received):
            piece = adapter.recv(4096).decode()
            assert piece, received
            received += piece
        assert re.search(r'"success": ?true', received)
