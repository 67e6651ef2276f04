"""`%distributed plan` as a form of a page: its settings, what a change would do, and what a step would then take.

Changes nothing: the page writes the line into a cell, which does. Independent of how the form looks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from nbdist.client.magic_lines.plan_line import (
    allowed_words,
    flags,
    named_settings,
    plan_parser,
    text_of,
    words_for,
)
from nbdist.client.session.current import get_session, living_session
from nbdist.client.session.session import Session, rank_set_of
from nbdist.client.start import session_plan
from nbdist.errors import RankError, UsageError
from nbdist.plan import Plan
from nbdist.planning.rules import with_parts_dropped
from nbdist.planning.settings import SETTINGS, default_of
from nbdist.wire.pages.page_messages import PlanDraft, PlanField


class PlanForm:
    """Tells a page of the plan of this notebook's session, or of its next one."""

    def __init__(self) -> None:
        self._parser = plan_parser()

    def fields(self) -> list[PlanField]:
        """Return all settings, with the current plan's values."""
        plan = _current(living_session())
        return [
            PlanField(
                name,
                setting.group,
                setting.help,
                list(allowed_words(setting.kind)),
                text_of(setting.kind, getattr(plan, name)),
                text_of(setting.kind, default_of(name)),
                list(setting.owners),
                setting.why,
            )
            for name, setting in SETTINGS.items()
        ]

    def draft(self, settings: Mapping[str, str]) -> PlanDraft:
        """Return the line that changes these settings.

        Args:
            settings: Their values, as text.

        Raises:
            UsageError: What that line would raise.
        """
        session = living_session()
        before = _current(session)
        after = self._changed(before, settings)
        if session is not None:
            _refuse_impossible(session, after)
        difference = before.diff(after)
        return PlanDraft(f"%distributed plan {flags(before, after)}" if difference else "", difference)

    def estimate(self, settings: Mapping[str, str], model: str, batch: str) -> str:
        """Return the memory of a training step on each rank if these settings were changed, in words.

        Args:
            settings: Their values, as text.
            model: Expression of the model on rank 0, or of a function that makes it.
            batch: Expression of a micro-batch on rank 0.

        Raises:
            SessionError: There are no ranks, or they are running something.
            UsageError: The ranks could not follow the plan, or there are no such variables; the text says why.
        """
        from nbdist.train.estimate.propose import estimate_in_words

        session = get_session()
        if not (model.strip() and batch.strip()):
            raise UsageError("an estimate needs a model and a micro-batch: enter the names of two variables of rank 0")
        plan = self._changed(session.plan, settings)
        _refuse_impossible(session, plan)
        arguments = (model.strip(), batch.strip(), plan.to_json(), len(session.ranks))
        try:
            (found,) = rank_set_of(session).set_up(estimate_in_words, *arguments, ranks=[0])
        except RankError as error:
            if error.first is not None and isinstance(error.first.exception, UsageError):
                raise error.first.exception from None
            raise
        return str(found)

    def _changed(self, plan: Plan, settings: Mapping[str, str]) -> Plan:
        arguments = self._parser.read(shlex.join(words_for(settings)))
        return plan.replace(**with_parts_dropped(plan, named_settings(arguments)))


def _current(session: Session | None) -> Plan:
    return session.plan if session is not None else session_plan.kept()


def _refuse_impossible(session: Session, plan: Plan) -> None:
    backend = None if session.backend == "none" else session.backend
    plan.check(world_size=len(session.ranks), backend=backend, device=session.ranks[0].device)
