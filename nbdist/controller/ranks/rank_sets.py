"""Which set of ranks there is, which has been asked for next, and when one follows the other.

Knows the nodes that a set waits for; independent of what ranks do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from nbdist.base.text import counted
from nbdist.controller.base.message_router import MessageRouter
from nbdist.controller.nodes.node_table import NodeTable, NoEntrance
from nbdist.controller.nodes.placement import shared_out
from nbdist.controller.ranks.members import Members
from nbdist.wire.base.message import Message
from nbdist.wire.messages.handover import Choices
from nbdist.wire.messages.life import SERIALS, Start, StartFailed, Stopped
from nbdist.wire.messages.output import Notice
from nbdist.wire.questions.questions import WatchNodes


class RankSets:
    """The sets of ranks of a controller, one after the other.

    Args:
        nodes: Where ranks can be.
        router: To send to ranks by.
        tell: Gives the notebook a message.
        keep: Writes output to the log, as of `Rank`.
        begin_set: Called with a new set's linger.
        clear_log: Called when a session is over.

    Attributes:
        members: The present set.
        started: What it was started with.
        choices: Of the notebook, for it.
    """

    def __init__(
        self,
        nodes: NodeTable,
        router: MessageRouter,
        tell: Callable[[Message], None],
        keep: Callable[[int, int, int, int, bytes], None],
        begin_set: Callable[[float], None],
        clear_log: Callable[[], None],
    ) -> None:
        self.members: Members | None = None
        self.started: Start | None = None
        self.choices = Choices()
        self._incarnation = 0
        self._serials = itertools.count(1)  # blocks of them: no client gives a number that another has given
        self._pending: Start | None = None  # waits for the end of the present set, or for nodes to come
        self._nodes = nodes
        self._router = router
        self._tell = tell
        self._keep = keep
        self._begin_set = begin_set
        self._clear_log = clear_log

    def choose(self, choices: Choices) -> None:
        """Note what the notebook has chosen for the present set."""
        self.choices = choices

    def first_serial(self) -> int:
        """Return where a client's count of cells may begin."""
        return next(self._serials) * SERIALS

    def tick(self, now: float) -> None:
        """Act on what is due while there are no ranks."""
        if self._pending is not None and now >= self._nodes.due_to_come:
            self._give_up_waiting(self._pending)

    def start(self, message: Start) -> None:
        """Bring up a set, once the present one has ended and its nodes are there."""
        self._pending = message
        if self.members is not None:
            self.members.end()
            return
        try:
            self._nodes.want(message.nodes)
        except NoEntrance as error:
            self._pending = None
            self._tell(StartFailed(str(error)))
            return
        self.start_when_all_are_there()

    def node_came(self) -> None:
        """Note that a node has come: for a set that waits for it, or in place of one that the present set has lost."""
        if self.members is not None:
            self.members.machine_came()
        else:
            self.start_when_all_are_there()

    def start_when_all_are_there(self) -> None:
        """Bring up the set that waits for nodes, if none is missing any more."""
        message = self._pending
        if message is None or self.members is not None or self._nodes.missing > 0:
            return
        try:
            shares = shared_out(message.options, message.nodes, self._nodes)
        except NoEntrance as error:
            self._pending = None
            self._tell(StartFailed(str(error)))
            return
        self._pending, self.started, self.choices = None, message, Choices()
        self._incarnation += 1
        self._begin_set(message.linger)
        self.members = Members(
            self._incarnation,
            shares,
            message.nodes.address if message.nodes is not None else "127.0.0.1",
            message.nodes.interface if message.nodes is not None else "",
            self._nodes,
            self._router,
            self._tell,
            self._keep,
            self.first_serial(),
        )
        self.members.spawn()

    def _give_up_waiting(self, message: Start) -> None:
        assert message.nodes is not None
        self._pending = None
        came, missing = message.nodes.count - self._nodes.missing, self._nodes.missing
        self._nodes.dismiss()
        self._tell(
            StartFailed(
                f"{came} of {message.nodes.count} nodes joined; {counted(missing, 'node')} did not join within "
                f"{message.nodes.patience:g} s. Check that the others can reach {message.nodes.address} and that no "
                "firewall blocks them. `%distributed start` tries again, with new lines to paste"
            )
        )

    def nodes_fail(self, why: str) -> None:
        """Give up nodes that won't come."""
        if self._pending is not None and self.members is None:
            self._pending = None
            self._nodes.dismiss()
            self._tell(StartFailed(f"{why}. Then type `%distributed start` again"))
        elif self.members is not None and self.members.newcomers.waiting:
            self.members.newcomers.fail(f"{why}. Then type `%distributed heal` again")
        else:
            self._tell(Notice(why))

    def stop(self, grace: float) -> None:
        """End the present set, and don't bring up another."""
        self._pending = None
        self._nodes.broadcast(WatchNodes(0.0))  # for another session the agents are asked anew
        if self.members is not None:
            self.members.end(grace)
        else:
            self._nodes.dismiss()
            self._tell(Stopped())

    def check_gone(self) -> None:
        """Note that processes have ended: of the last one of a set, the next may follow."""
        if self.members is None or not self.members.roster.all_gone:
            return
        self.members = None
        self._router.forget(b"rank")
        if self._pending is not None:
            self.start(self._pending)
        else:
            self._clear_log()  # it was of this session
            self._nodes.dismiss()
            self._tell(Stopped())
