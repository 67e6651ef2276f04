"""Times that ranks of other nodes report, on this node's clock, so that what failed first is first. Pure."""

from __future__ import annotations

import msgspec

from nbdist.wire.messages.cells import Reply
from nbdist.wire.questions.knowing import KnownFailure
from nbdist.wire.questions.questions import Answer


def answer_on_our_clock(answer: Answer, offset: float) -> Answer:
    """Return the answer with the time of the failure that it reports, if it does, on our clock."""
    if not isinstance(answer.body, KnownFailure) or not offset:
        return answer
    body = msgspec.structs.replace(answer.body, when=answer.body.when - offset)
    return msgspec.structs.replace(answer, body=body)


def reply_on_our_clock(reply: Reply, offset: float) -> Reply:
    """Return the reply with its failure's time on our clock, so that failures of all nodes compare."""
    if reply.failure is None or not offset:
        return reply
    failure = msgspec.structs.replace(reply.failure, when=reply.failure.when - offset)
    return msgspec.structs.replace(reply, failure=failure)
