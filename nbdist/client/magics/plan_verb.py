"""The plan of a session: `%distributed plan` reads, shows, changes and proposes it. Knows no model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.client.magics.magic_line import size, table
from nbdist.client.magics.plan_line import flags, named_settings
from nbdist.errors import RankError, UsageError
from nbdist.plan import PLAN_VARIABLE, Plan
from nbdist.planning.follow import follow
from nbdist.planning.rules import with_parts_dropped
from nbdist.planning.variables import NAMES
from nbdist.wire.life import StartOptions

if TYPE_CHECKING:
    from nbdist.client.session.session import Session

_WORTH_A_WORD = 1 << 30  # bytes that others hold of a GPU: what ranks hold beside torch is only known about
_KEPT_BY_MODELS = "Models that were prepared earlier keep the old plan: prepare them again to use this one."

_kept: Plan | None = None  # what was typed, for the sessions that are yet to start


class SessionPlan:
    """What the ranks of one session are to follow.

    Attributes:
        current: The plan.
    """

    def __init__(self) -> None:
        self._chosen = _kept
        self.current = Plan()

    def carry(self, options: StartOptions) -> StartOptions:
        """Put the plan into what ranks are started with: the one that was chosen, else the one in the environment.

        Raises:
            UsageError: NBDIST_PLAN holds no plan, or such ranks can't follow it.
        """
        plan = self._chosen or Plan.from_environment()
        device = "cuda" if options.gpus else "cpu"
        try:
            plan.check(world_size=options.count, backend=_expected_backend(options), device=device)
        except UsageError as error:
            way_out = "`%distributed plan` shows the plan, `%distributed plan --reset` begins with a new one"
            raise UsageError(f"these ranks can't follow the notebook's plan: {error}. {way_out}") from None
        self.current = plan
        variables = plan.environment(world_size=options.count, device=device)
        if self._chosen is None:  # nobody has chosen: what the notebook says itself counts more
            return msgspec.structs.replace(options, environment=variables | options.environment)
        kept = {name: value for name, value in options.environment.items() if name not in NAMES}
        environment = kept | variables | {PLAN_VARIABLE: plan.to_json()}
        return msgspec.structs.replace(options, environment=environment)

    def set(self, session: Session, plan: Plan) -> None:
        """Have the ranks follow a plan, and those of later starts.

        Raises:
            UsageError: These ranks can't; nothing has changed anywhere.
            SessionBusy: They are running something.
        """
        device = session.ranks[0].device
        plan.check(world_size=len(session.ranks), backend=_none_as_unknown(session.backend), device=device)
        environment = {PLAN_VARIABLE: plan.to_json()} | plan.environment(world_size=len(session.ranks), device=device)
        session.set_up(follow, environment, ranks=session.living())
        self._chosen = self.current = plan
        keep(plan)


def keep(plan: Plan) -> None:
    """Keep a plan for sessions that start later in this notebook."""
    global _kept
    plan.to_json()  # a session could not carry it
    _kept = plan


def for_launch(environment: Mapping[str, str], precision: str) -> dict[str, str]:
    """The variable by which ranks of a launch follow the plan: the one that was typed, else that of the environment.

    Args:
        environment: What the ranks are started with.
        precision: What the launch asks for; "no": the plan's.

    Raises:
        UsageError: NBDIST_PLAN holds no plan, or the plan can't have this precision.
    """
    if _kept is None and not environment.get(PLAN_VARIABLE):
        return {}  # ranks find the precision where launchers say it
    plan = _kept or Plan.from_environment()
    if precision != "no":
        plan = plan.replace(precision=precision)
    return {PLAN_VARIABLE: plan.to_json()}


def do(session: Session | None, arguments: argparse.Namespace) -> str:
    """What `%distributed plan` does.

    Args:
        session: The one whose ranks are to follow the plan; None: none is running.

    Returns:
        What it has to say.
    """
    auto = arguments.strategy == "auto"
    if auto != bool(arguments.model and arguments.batch) or (not auto and (arguments.model or arguments.batch)):
        raise UsageError(
            "`%distributed plan auto` needs a model and a batch, and only it does; they are variables of rank 0: "
            "`%distributed plan auto --model model --batch batch`"
        )
    before = _current(session)
    after = _changed(Plan() if arguments.reset else before, arguments)
    if auto:
        return _propose(session, after, arguments)
    if not arguments.reset and not named_settings(arguments):
        return _describe(session, before)
    return _change(session, before, after)


def _current(session: Session | None) -> Plan:
    if session is not None:
        return session.plan
    return _kept or Plan.from_environment()


def _changed(plan: Plan, arguments: argparse.Namespace) -> Plan:
    return plan.replace(**with_parts_dropped(plan, named_settings(arguments)))


def _describe(session: Session | None, plan: Plan) -> str:
    if session is None:
        return f"{plan.table()}\nNo session is running: the next start takes this plan."
    return plan.table(world_size=len(session.ranks), device=session.ranks[0].device)


def _change(session: Session | None, before: Plan, after: Plan) -> str:
    difference = before.diff(after)
    if session is None:
        keep(after)
        return "\n".join([*difference, "Kept for the next start: no session is running."])
    session.set_plan(after)
    if not difference:
        return "The plan is that already."
    return "\n".join([*difference, _KEPT_BY_MODELS])


def _propose(session: Session | None, plan: Plan, arguments: argparse.Namespace) -> str:
    from nbdist.client.session.session import get_session

    session = session or get_session()
    found = _ask_for_proposal(session, plan, arguments.model, arguments.batch)
    rows = [(name, size(total), f"{total / found['memory']:.0%}") for name, total in found["tried"]]
    shown = table(rows, ("strategy", "memory per rank", f"of {size(found['memory'])}"))
    if found["taken"] > _WORTH_A_WORD:
        shown += f"\nOther processes hold {size(found['taken'])} of the GPU: `nvidia-smi` lists them."
    if found["plan"] is None:
        return f"{shown}\nNone of them fits: take more ranks, a smaller batch, or --precision bf16."
    proposed = Plan.from_json(found["plan"])
    why = "the first that fits with a tenth to spare, in the order of what they cost in speed"
    words = flags(session.plan, proposed)
    take = f"`%distributed plan {words}` takes it." if words else "It is the plan already."
    return f"{shown}\nProposed is {found['tried'][-1][0]}: {why}.\n{take}"


def _ask_for_proposal(session: Session, plan: Plan, model: str, batch: str) -> dict[str, Any]:
    """Have rank 0 estimate its variables, where they are."""
    world_size = len(session.ranks)
    device = session.ranks[0].device
    sharing = sum(info.device == device for info in session.ranks)
    function = "__import__('nbdist.train.estimate.propose', fromlist=['propose']).propose"
    call = f"{function}(({model}), ({batch}), {plan.to_json()!r}, world_size={world_size}, sharing={sharing})"
    try:
        return dict(session.pull(call, 0))
    except UsageError as error:
        cause = error.__context__
        if isinstance(cause, RankError) and cause.first is not None:
            raise UsageError(f"--model and --batch are variables of rank 0: {cause.first.text}") from None
        raise


def _expected_backend(options: StartOptions) -> str | None:
    if not options.init or options.backend is not None:
        return options.backend if options.init else None
    return "cpu:gloo,cuda:nccl" if options.gpus and len(options.gpus) >= options.count else "gloo"


def _none_as_unknown(backend: str) -> str | None:
    return None if backend == "none" else backend
