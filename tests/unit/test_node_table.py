"""The nodes of a session, as its controller knows them: who may join, who is silent, who is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from nbdist.base import limits
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.nodes.node_table import KnownNode, NodeTable, NoEntrance
from nbdist.wire.base.keys import Keys
from nbdist.wire.base.message import VERSION, Hello, Message
from nbdist.wire.frames import decode, encode
from nbdist.wire.lanes import AGENT_CONTROL, connect, node_lane
from nbdist.wire.messages.life import Progress
from nbdist.wire.messages.output import Notice
from nbdist.wire.processes.nodes import Invited, Join, NodesWanted, Ping, Pong, Refused, Token, Versions, Welcome

SILENCE, LOST = limits.silence(limits.NODE_TIMEOUT), limits.NODE_TIMEOUT


class Table:
    """A table of nodes, what it has said to the notebook, and whom it has lost."""

    def __init__(self, folder: Path) -> None:
        self.router = MessageRouter(folder)
        self.said: list[Message] = []
        self.lost: list[tuple[KnownNode, str]] = []
        self.nodes = NodeTable(self.router, self.said.append, lambda node, why: self.lost.append((node, why)))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guests = 0

    def tokens(self) -> list[tuple[str, Token]]:
        """Addresses and tokens of those who are invited."""
        invited = [found for found in self.said if isinstance(found, Invited)]
        return [(found.address, Token.parse(text)) for found in invited for text in found.tokens]

    def join(self, address: str, token: Token, versions: Versions | None = None, gpus: int = 0) -> Message:
        """Be a guest with a token. Returns what it is answered."""
        self._guests += 1
        keys = Keys(f"tcp://{address}", token.server_key, zmq.curve_public(token.secret_key), token.secret_key)
        guest = connect(self.context, keys, f"guest/{self._guests}".encode())
        asked = Join(VERSION, "other", versions or Versions.here(), gpus)
        while not guest.poll(20):
            for lane, (frame,) in self.router.received(1):
                if isinstance(decode(frame), Hello):
                    self.nodes.join(lane, self.router.key_of(lane), asked)
        answer = decode(guest.recv())
        guest.close(linger=0)
        return answer

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.router.remove_files()
        self.router.close()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    found = Table(tmp_path)
    yield found
    found.close()


def test_each_missing_node_gets_a_token_of_its_own(table: Table) -> None:
    table.nodes.want(NodesWanted(3, "127.0.0.1"))
    tokens = [token for _, token in table.tokens()]
    assert len(tokens) == 2 and tokens[0].secret_key != tokens[1].secret_key
    assert table.nodes.missing == 2


def test_who_has_a_token_becomes_a_node(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    answer = table.join(*table.tokens()[0])
    assert isinstance(answer, Welcome) and answer.node == 1
    assert table.nodes.missing == 0 and table.nodes[1].host == "other"


@pytest.mark.parametrize("name", ["Python", "torch", "nbdist"])
def test_another_version_is_refused_and_its_token_is_still_good(table: Table, name: str) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    address, token = table.tokens()[0]
    refused = table.join(address, token, msgspec.structs.replace(Versions.here(), **{name: "0.1"}))
    assert isinstance(refused, Refused) and f"{name} 0.1 there" in refused.text
    assert isinstance(table.join(*table.tokens()[0]), Welcome)


def pass_time(table: Table, until: float) -> None:
    """Let the controller do what is due, in time."""
    while table.nodes.due() <= until:
        table.nodes.tick(table.nodes.due())


def test_a_controller_that_was_stopped_itself_asks_again_before_it_judges(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0])
    table.said.clear()
    again = table.nodes[1].heard + LOST + 1
    table.nodes.tick(again)
    table.nodes.heard(1, Pong(again, 0.0), again + 0.1)
    pass_time(table, again + SILENCE)
    assert not table.said and not table.lost


def test_a_silent_node_is_reported_once_and_again_when_it_answers(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0])
    table.said.clear()
    heard = table.nodes[1].heard
    pass_time(table, heard + SILENCE + 3)
    table.nodes.heard(1, Pong(heard + SILENCE + 3, 0.0), heard + SILENCE + 4)
    texts = [found.text for found in table.said if isinstance(found, Notice)]
    assert len(texts) == 2 and "has not answered for 12 s" in texts[0] and "answers again, after 14 s" in texts[1]
    assert not table.lost


def test_a_node_that_stays_silent_is_lost(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0])
    pass_time(table, table.nodes[1].heard + LOST + 2)
    [(node, why)] = table.lost
    assert node.number == 1 and "has not answered for 62 s" in why
    assert 1 not in table.nodes and table.nodes.missing == 1


def test_the_clock_of_a_node_is_known_by_the_shortest_round_trip(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0])
    table.nodes.heard(1, Pong(100.0, 1100.4), 101.0)
    table.nodes.heard(1, Pong(200.0, 1200.1), 200.2)
    table.nodes.heard(1, Pong(300.0, 1309.0), 310.0)
    assert table.nodes[1].offset == pytest.approx(1000.0)


def test_a_port_that_is_taken_is_named(table: Table) -> None:
    port = int(table.router.node_keys.url.rpartition(":")[2])
    with pytest.raises(NoEntrance, match=f"port {port} of 127.0.0.1 is taken"):
        table.nodes.want(NodesWanted(2, "127.0.0.1", port))


def test_the_keys_of_a_lost_node_open_nothing_any_more(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    answer = table.join(*table.tokens()[0])
    assert isinstance(answer, Welcome)
    agent = connect(table.context, answer.keys, node_lane(AGENT_CONTROL, 1))
    while not [lane for lane, _ in table.router.received(1)]:
        table.router.socket.poll(100)
    table.nodes.lose(table.nodes[1], "of this test")
    agent.send(encode(Pong(0.0, 0.0)))
    assert table.router.socket.poll(5000)
    heard = list(table.router.received(1))
    agent.close(linger=0)
    assert heard == []


def test_a_node_that_listens_is_asked_several_times_so_that_its_clock_is_known_soon(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    answer = table.join(*table.tokens()[0])
    assert isinstance(answer, Welcome)
    agent = connect(table.context, answer.keys, node_lane(AGENT_CONTROL, 1))
    pings = 0
    while pings < 8:
        for lane, (frame,) in table.router.received(1):
            if isinstance(decode(frame), Hello):
                table.router.connect(lane)
                table.nodes.connected(1)
        if agent.poll(20) and isinstance(ping := decode(agent.recv()), Ping):
            pings += 1
            table.nodes.heard(1, Pong(ping.sent, ping.sent + 5), ping.sent)
    assert not agent.poll(100)
    agent.close(linger=0)
    assert table.nodes[1].offset == pytest.approx(5.0)


def test_a_machine_without_ranks_is_none_of_the_nodes_that_are_counted(table: Table) -> None:
    table.nodes.want(NodesWanted(3, "127.0.0.1", ranks=2, shares=[0]))
    table.join(*table.tokens()[0])
    assert any(isinstance(said, Progress) and "(1 of 2 nodes)" in said.text for said in table.said)


def test_how_long_a_node_may_be_silent_can_be_said(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1", timeout=6.0))
    answer = table.join(*table.tokens()[0])
    assert isinstance(answer, Welcome) and answer.timeout == 6.0
    now = table.nodes[1].heard
    table.nodes.heard(1, Pong(now, now), now)
    pass_time(table, now + 3)
    assert table.nodes[1].silent
    pass_time(table, now + 7)
    assert len(table.lost) == 1


def test_only_the_place_of_the_lost_node_is_given_to_another(table: Table) -> None:
    table.nodes.want(NodesWanted(3, "127.0.0.1"))
    for place in table.tokens():
        table.join(*place)
    table.said.clear()
    table.nodes.lose(table.nodes[1], "of this test")
    table.nodes.recall({1: 2})
    [(address, token)] = table.tokens()
    assert table.nodes.heir(1) is None
    answer = table.join(address, token)
    assert isinstance(answer, Welcome) and table.nodes.heir(1) == answer.node
    assert {node.seat for node in table.nodes} == {0, 1, 2}


@pytest.mark.parametrize(("gpus", "comes"), [(1, False), (2, True), (8, True)])
def test_who_comes_in_place_of_another_has_as_many_gpus_as_its_ranks_used(table: Table, gpus: int, comes: bool) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0], gpus=4)
    table.said.clear()
    table.nodes.lose(table.nodes[1], "of this test")
    table.nodes.recall({1: 2})
    answer = table.join(*table.tokens()[0], gpus=gpus)
    assert isinstance(answer, Welcome) == comes
    assert comes or (isinstance(answer, Refused) and "had ranks on 2 GPUs, but it has 1 GPU" in answer.text)


def test_who_was_invited_in_place_of_another_is_not_let_in_after_that_was_given_up(table: Table) -> None:
    table.nodes.want(NodesWanted(2, "127.0.0.1"))
    table.join(*table.tokens()[0])
    table.said.clear()
    table.nodes.lose(table.nodes[1], "of this test")
    table.nodes.recall({1: 2})
    table.nodes.uninvite()
    assert table.nodes.due_to_come == float("inf")
    table.nodes.recall({1: 2})
    (first, second) = table.tokens()
    assert first != second and isinstance(table.join(*second), Welcome)
