"""The plan that the ranks of a session follow: the one chosen in this notebook, else the environment's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from nbdist.base.text import counted
from nbdist.errors import UsageError
from nbdist.plan import PLAN_VARIABLE, Plan
from nbdist.planning.variables import NAMES
from nbdist.train.active_training import follow
from nbdist.wire.messages.life import RankInfo, StartOptions
from nbdist.wire.processes.nodes import NodesWanted

chosen_plan: Plan | None = None  # the chosen plan, for sessions that start later


class SessionPlan:
    """The plan that the ranks of one session follow.

    Attributes:
        current: The plan.
    """

    def __init__(self) -> None:
        self._chosen = chosen_plan
        self._changed = False  # since the ranks were started
        self.current = Plan()

    def carry(self, options: StartOptions, nodes: NodesWanted | None) -> StartOptions:
        """Put the plan into the start options: the chosen one, else the one in the environment.

        Args:
            options: The options, of this node.
            nodes: The nodes that the ranks are on; None: this one.

        Raises:
            UsageError: NBDIST_PLAN holds no plan, or these ranks can't follow it.
        """
        plan = self._chosen or Plan.from_environment()
        device = "cuda" if options.gpus else "cpu"
        world_size = nodes.world_size(options.count) if nodes is not None else options.count
        try:
            plan.check(world_size=world_size, backend=_expected_backend(options), device=device)
        except UsageError as error:
            way_out = "`%distributed plan` shows the plan, `%distributed plan --reset` starts from the default plan"
            raise UsageError(f"these ranks can't follow the notebook's plan: {error}. {way_out}") from None
        self.current, self._changed = plan, False
        variables = plan.environment(world_size=world_size, device=device)
        own = options.environment
        if self._chosen is None:  # nothing was chosen: the notebook's own variables take precedence
            return options.with_variables(
                variables | {name: own[name] for name in (*variables, PLAN_VARIABLE) if name in own}
            )
        without = msgspec.structs.replace(options, environment=_others(own), changed=_others(options.changed))
        return without.with_variables(variables | {PLAN_VARIABLE: plan.to_json()})

    def set(self, plan: Plan, ranks: Sequence[RankInfo], backend: str, set_up: Callable[..., Any]) -> None:
        """Have ranks follow a plan, and those of later starts.

        Args:
            plan: The plan.
            ranks: All ranks.
            backend: The backend of their process group.
            set_up: Calls a function with its arguments on the living ranks.

        Raises:
            UsageError: These ranks can't follow it; nothing has changed anywhere.
            SessionBusy: They are running something.
        """
        count, device = len(ranks), ranks[0].device
        plan.check(world_size=count, backend=_none_as_unknown(backend), device=device)
        set_up(follow, {PLAN_VARIABLE: plan.to_json()} | plan.environment(world_size=count, device=device))
        self._chosen = self.current = plan
        self._changed = True
        keep(plan)

    def adopt(self, plan: Plan) -> None:
        """Go on with the plan that another client has given the ranks, also for those that start later."""
        self.current = plan
        if plan != Plan():
            self._chosen, self._changed = plan, True
            keep(plan)

    def catch_up(self, ranks: Sequence[RankInfo], set_up: Callable[..., Any]) -> None:
        """Have newcomers follow the plan, if the others have been given one since their start.

        Args:
            ranks: All ranks.
            set_up: Calls a function with its arguments on the newcomers.
        """
        if self._changed:
            set_up(follow, self._variables(ranks))

    def explain_misfit(self, ranks: Sequence[RankInfo], backend: str) -> str:
        """Return why the plan does not fit the ranks that there are now; "" if it does."""
        try:
            self.current.check(world_size=len(ranks), backend=_none_as_unknown(backend), device=ranks[0].device)
        except UsageError as error:
            return f"the plan does not fit {counted(len(ranks), 'rank')}: {error}"
        return ""

    def _variables(self, ranks: Sequence[RankInfo]) -> dict[str, str]:
        plan = self.current
        return {PLAN_VARIABLE: plan.to_json()} | plan.environment(world_size=len(ranks), device=ranks[0].device)


def _others(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that no plan sets."""
    return {name: value for name, value in variables.items() if name not in NAMES}


def kept() -> Plan:
    """Return the plan of sessions that start later in this notebook.

    Raises:
        UsageError: NBDIST_PLAN holds no plan.
    """
    return chosen_plan or Plan.from_environment()


def has_chosen_plan() -> bool:
    """Return whether a plan was chosen in this notebook."""
    return chosen_plan is not None


def keep(plan: Plan) -> None:
    """Keep a plan for sessions that start later in this notebook."""
    global chosen_plan
    plan.to_json()  # otherwise a session could not send it
    chosen_plan = plan


def for_launch(environment: Mapping[str, str], precision: str) -> dict[str, str]:
    """Return the variable that gives the ranks of a launch their plan: the chosen one, else the environment's.

    Args:
        environment: The environment of the ranks.
        precision: The precision that the launch asks for; "no" for the plan's.

    Raises:
        UsageError: NBDIST_PLAN holds no plan, or the plan can't have this precision.
    """
    if chosen_plan is None and not environment.get(PLAN_VARIABLE):
        return {}  # ranks find the precision where launchers set it
    plan = kept()
    if precision != "no":
        plan = plan.replace(precision=precision)
    return {PLAN_VARIABLE: plan.to_json()}


def _expected_backend(options: StartOptions) -> str | None:
    if not options.init or options.backend is not None:
        return options.backend if options.init else None
    return options.usual_backend


def _none_as_unknown(backend: str) -> str | None:
    return None if backend == "none" else backend
