"""The plan of a session: `%distributed plan` reads, shows, changes and proposes it. Independent of models."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from nbdist.base.text import percent, size, table
from nbdist.client.magic_lines.plan_line import flags, named_settings
from nbdist.client.session.current import get_session
from nbdist.client.session.session import Session, rank_set_of
from nbdist.client.start import session_plan
from nbdist.errors import RankError, UsageError
from nbdist.plan import Plan
from nbdist.planning import accelerate_config, deepspeed
from nbdist.planning.deepspeed import DeepSpeedConfig
from nbdist.planning.rules import own_settings, with_parts_dropped

_WORTH_A_WORD = 1 << 30  # GPU bytes held by others; how much ranks hold outside of torch is not known exactly
_KEPT_BY_MODELS = "Models that were prepared earlier keep the old plan: prepare them again to use this one."

_AUTOMATIC = (
    'Accelerate and transformers fill in "auto"; for `deepspeed.initialize`, put the batch size of a rank into '
    "train_micro_batch_size_per_gpu"
)


def do(session: Session | None, arguments: argparse.Namespace) -> str:
    """Carry out `%distributed plan`.

    Args:
        session: The session whose ranks follow the plan; None if none is running.

    Returns:
        The text to show.
    """
    auto = arguments.strategy == "auto"
    if auto != bool(arguments.model and arguments.batch) or (not auto and (arguments.model or arguments.batch)):
        raise UsageError(
            "--model and --batch belong to `%distributed plan auto`, which needs both; they name variables of rank 0: "
            "`%distributed plan auto --model model --batch batch`"
        )
    before = _current(session)
    if arguments.config is not None or arguments.write is not None:
        return _exchange(session, before, arguments)
    if arguments.source is not None:
        after, notes = _read(arguments.source, named_settings(arguments))
        shown = _propose(session, after, arguments) if auto else _change(session, before, after)
        return "\n".join([shown, *notes])
    after = _changed(Plan() if arguments.reset else before, named_settings(arguments))
    if auto:
        return _propose(session, after, arguments)
    if not arguments.reset and not named_settings(arguments):
        return _describe(session, before)
    return _change(session, before, after)


def _current(session: Session | None) -> Plan:
    if session is not None:
        return session.plan
    return session_plan.kept()


def _read(source: str, wanted: dict[str, Any]) -> tuple[Plan, list[str]]:
    """Return the plan of a file of Accelerate with the wanted settings, and what of the file has no equivalent."""
    reading = accelerate_config.read(source or None)
    plan = Plan()
    try:
        return plan.replace(**reading.settings | with_parts_dropped(plan, wanted)), reading.notes
    except UsageError as error:
        raise UsageError(f"{reading.file}: {error}") from None


def _exchange(session: Session | None, before: Plan, arguments: argparse.Namespace) -> str:
    """Take a plan from a file of DeepSpeed, or write one. Nothing has changed if either fails."""
    if arguments.strategy == "auto" or arguments.source is not None:
        raise UsageError(
            "--config and --write are files of DeepSpeed: `%distributed plan deepspeed --config FILE`, without --from "
            "or auto"
        )
    wanted = named_settings(arguments)
    notes: list[str] = []
    after = _changed(Plan() if arguments.reset else before, {} if arguments.config is not None else wanted)
    if arguments.config is not None:
        after, notes = _configured(after, arguments.config, wanted)
    if arguments.write is None:
        return "\n".join([_change(session, before, after), *notes])
    if after.strategy != "deepspeed":
        raise UsageError(
            f"--write is for DeepSpeed, and the strategy is {after.strategy!r}: `%distributed plan deepspeed --write "
            f"{arguments.write}`"
        )
    shown = _change(session, before, after)
    try:
        notes.append(f"wrote {DeepSpeedConfig.of(after).write(arguments.write)}: {_AUTOMATIC}")
    except UsageError:
        _change(session, after, before)
        raise
    return "\n".join([shown, *notes])


def _configured(plan: Plan, config: str, wanted: dict[str, Any]) -> tuple[Plan, list[str]]:
    """Return a plan with what a file of DeepSpeed says, and the wanted settings; and what has no equivalent."""
    reading = deepspeed.read(config)
    settings = reading.settings | wanted
    try:
        return plan.replace(**own_settings(plan, settings["strategy"]) | settings), reading.notes
    except UsageError as error:
        raise UsageError(f"{reading.file}: {error}") from None


def _changed(plan: Plan, wanted: dict[str, Any]) -> Plan:
    try:
        return plan.replace(**with_parts_dropped(plan, wanted))
    except UsageError as error:
        raise UsageError(f"{error}{_way_to(plan, wanted)}") from None


def _way_to(plan: Plan, wanted: dict[str, Any]) -> str:
    """Return the line that takes a plan to another strategy, where only settings of the last one stand against it."""
    strategy = wanted.get("strategy", plan.strategy)
    with contextlib.suppress(UsageError):
        if strategy != plan.strategy:
            return f": `%distributed plan {flags(plan, plan.replace(**own_settings(plan, strategy) | wanted))}`"
    return ""


def _describe(session: Session | None, plan: Plan) -> str:
    if session is None:
        return f"{plan.table()}\nNo session is running: the next one will use this plan."
    return plan.table(world_size=len(session.ranks), device=session.ranks[0].device)


def _change(session: Session | None, before: Plan, after: Plan) -> str:
    difference = before.diff(after)
    if session is None:
        session_plan.keep(after)
        return "\n".join([*difference, "No session is running: the next one will use this plan."])
    session.set_plan(after)
    if not difference:
        return "No change: this is already the plan."
    return "\n".join([*difference, _KEPT_BY_MODELS])


def _propose(session: Session | None, plan: Plan, arguments: argparse.Namespace) -> str:
    session = session or get_session()
    found = _ask_for_proposal(session, plan, arguments.model, arguments.batch)
    rows = [(name, size(total), percent(total / found["memory"])) for name, total in found["tried"]]
    shown = table(rows, ("strategy", "memory per rank", f"of {size(found['memory'])}"))
    if found["taken"] > _WORTH_A_WORD:
        shown += f"\nOther processes hold {size(found['taken'])} of the GPU: `nvidia-smi` lists them."
    if found["plan"] is None:
        return f"{shown}\nNone of them fits: use more ranks, a smaller batch, or --precision bf16."
    proposed = Plan.from_json(found["plan"])
    why = "the fastest that fits with 10 % of the memory to spare"
    words = flags(session.plan, proposed)
    take = f"`%distributed plan {words}` applies it." if words else "This is already the plan."
    return f"{shown}\nProposed: {found['tried'][-1][0]}, {why}.\n{take}"


def _ask_for_proposal(session: Session, plan: Plan, model: str, batch: str) -> dict[str, Any]:
    """Have rank 0 estimate its own variables."""
    from nbdist.train.estimate.propose import propose_variables

    world_size = len(session.ranks)
    device = session.ranks[0].device
    sharing = sum(info.device == device for info in session.ranks)
    try:
        (found,) = rank_set_of(session).set_up(
            propose_variables, model, batch, plan.to_json(), world_size, sharing, ranks=[0]
        )
    except RankError as error:
        if error.first is not None and isinstance(error.first.exception, UsageError):
            raise error.first.exception from None
        raise
    return dict(found)
