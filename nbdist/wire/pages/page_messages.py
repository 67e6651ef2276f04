"""What a notebook's page and its kernel say to each other."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from nbdist.wire.pages.panel_messages import PanelFrame, PanelNews, PanelWish

PAGE_PROTOCOL = 7


class _Request(msgspec.Struct, frozen=True, tag_field="do"):
    """What a page asks for.

    Attributes:
        id: Its number, which the reply repeats.
    """

    id: int


class StateRequest(_Request, frozen=True, tag="state"):
    """How is the session? All replies say it."""


class InterruptRequest(_Request, frozen=True, tag="interrupt"):
    """Interrupt what the ranks run."""


class InterruptNowRequest(_Request, frozen=True, tag="interrupt-now"):
    """Interrupt what the ranks run without waiting for the end of a step."""


class StacksRequest(_Request, frozen=True, tag="stacks"):
    """Where is each rank in its code?"""


class WhyRequest(_Request, frozen=True, tag="why"):
    """Why did the last cell's steps take as long as they did?"""


class HealRequest(_Request, frozen=True, tag="heal"):
    """Replace the ranks that have died."""


class RestartRequest(_Request, frozen=True, tag="restart"):
    """Replace all ranks by fresh ones."""


class StopRequest(_Request, frozen=True, tag="stop"):
    """End the session."""


class LogRequest(_Request, frozen=True, tag="log"):
    """A page of what a rank has printed in a cell.

    Attributes:
        ranks: The rank.
        cell: The cell's number in the notebook; 0: the page does not know it.
        id_of_cell: Its id, as the page runs it with.
        code: Its text as the page has it.
        position: Where in the log to begin: `next` of the page before.
        words: Only lines with these; empty: all lines.
    """

    ranks: str
    cell: int = 0
    id_of_cell: str = ""
    code: str = ""
    position: int = 0
    words: str = ""


class VariablesRequest(_Request, frozen=True, tag="variables"):
    """What variables do the ranks have?

    Attributes:
        name: Of the only one that is compared, however large it is; empty: all.
    """

    name: str = ""


class EntriesRequest(_Request, frozen=True, tag="entries"):
    """What differs in a variable, as in a dict or a model?"""

    name: str


class FiguresRequest(_Request, frozen=True, tag="figures"):
    """The figures of a tensor on each rank."""

    name: str


class DifferenceRequest(_Request, frozen=True, tag="difference"):
    """Where does a tensor differ on two ranks?

    Attributes:
        name: The tensor's.
        ranks: Both: "0,3".
    """

    name: str
    ranks: str


class PlanRequest(_Request, frozen=True, tag="plan"):
    """All settings of the plan."""


class DraftRequest(_Request, frozen=True, tag="plan-draft"):
    """What would change with these settings?

    Attributes:
        settings: Those that differ from the current plan's, as text.
    """

    settings: dict[str, str]


class EstimateRequest(_Request, frozen=True, tag="estimate"):
    """What memory would a training step take?

    Attributes:
        settings: Those that differ from the current plan's, as text.
        model: An expression of rank 0.
        batch: Likewise.
    """

    settings: dict[str, str]
    model: str
    batch: str


PageRequest: TypeAlias = (
    StateRequest
    | InterruptRequest
    | InterruptNowRequest
    | StacksRequest
    | WhyRequest
    | HealRequest
    | RestartRequest
    | StopRequest
    | LogRequest
    | VariablesRequest
    | EntriesRequest
    | FiguresRequest
    | DifferenceRequest
    | PlanRequest
    | DraftRequest
    | EstimateRequest
)
SLOW = (EstimateRequest,)  # seconds, so they are done beside everything else


class PageLook(msgspec.Struct, frozen=True):
    """A page shows the lines of a rank.

    Attributes:
        id: Of the cell, as the page runs it with.
        rank: Which; None: no longer.
    """

    id: str
    rank: int | None


class PageCall(msgspec.Struct, frozen=True):
    """A message of a page: a request, a wish, or what it looks at."""

    request: PageRequest | None = None
    wish: PanelWish | None = None
    look: PageLook | None = None


class PageOpening(msgspec.Struct, frozen=True):
    """What a page opens its line with.

    Attributes:
        page: Names the page.
        protocol: What it speaks.
        left: Pages that were in its place before, and are gone.
    """

    page: str
    protocol: int
    left: list[str] = []


class CellOnRanks(msgspec.Struct, frozen=True):
    """A cell that runs on ranks.

    Attributes:
        number: In the notebook; 0 for a function.
        ranks: How many it began on.
        done: How many of these have ended their part.
        seconds: Since it began.
        step: The optimizer step up to which all of its ranks have come; 0: none, or nobody samples the ranks.
    """

    number: int
    ranks: int
    done: int
    seconds: float
    step: int = 0


class CellRan(msgspec.Struct, frozen=True):
    """A cell of the notebook that runs or has run on ranks.

    Attributes:
        id: As the page ran it with.
        number: In the notebook.
        ranks: Where: "0-7".
        failed: Those that failed by themselves.
    """

    id: str
    number: int
    ranks: str
    failed: str


class SessionState(msgspec.Struct, frozen=True):
    """The notebook's session.

    Attributes:
        ranks: How many the session has; 0: there is none.
        devices: Of its ranks, each once.
        dead: Ranks that have died.
        broken: Why the session broke; empty: it has not.
        cells: What its ranks run.
        auto: Whether every cell runs on all ranks.
        gpus: How many GPUs this machine has.
        session: By which name the Jupyter server lists it; empty: there is none.
        stopped: Whether it is broken only because somebody has stopped it from outside.
    """

    ranks: int
    devices: list[str]
    dead: list[int]
    broken: str
    cells: list[CellOnRanks]
    auto: bool
    gpus: int
    session: str
    stopped: bool = False


class LogPage(msgspec.Struct, frozen=True):
    """A part of what a rank has printed.

    Attributes:
        text: Its stdout and stderr, about 1 MiB at most.
        next: Where the next page begins; None: there is none.
    """

    text: str
    next: int | None


class VariableRow(msgspec.Struct, frozen=True):
    """A variable, in words.

    Attributes:
        name: Its name.
        kind: Its type; where ranks differ, all with their ranks.
        form: Shape and dtype, likewise; empty if it has none.
        device: Where its bytes are, likewise.
        memory: How much its values take; empty if that is not known.
        agreement: Whether ranks agree.
        odd: The ranks that differ from most others.
        agree: Whether ranks agree; None: not known.
        figures: Whether it has any.
        inside: Whether there may be entries that differ: "entries".
    """

    name: str
    kind: str
    form: str
    device: str
    memory: str
    agreement: str
    odd: list[int]
    agree: bool | None
    figures: bool
    inside: bool


class FigureRow(msgspec.Struct, frozen=True):
    """The figures of a tensor on a rank, as in `nbdist.wire.questions.held_variables.Figures`."""

    rank: int
    low: float | None
    mean: float | None
    high: float | None
    std: float | None
    zeros: int
    nans: int
    infinite: int
    bins: list[int]


class PlanField(msgspec.Struct, frozen=True):
    """A setting of the plan, as a form shows it.

    Attributes:
        name: Of the setting.
        group: Under which title it is shown; empty: above all titles.
        help: What it is for.
        words: The values it may have; empty: any text that the plan takes.
        value: What the current plan has.
        default: What it is if nobody sets it.
        owners: The strategies that it is for.
        why: Why the others have no use for it.
    """

    name: str
    group: str
    help: str
    words: list[str]
    value: str
    default: str
    owners: list[str]
    why: str


class PlanDraft(msgspec.Struct, frozen=True):
    """A plan that could be taken.

    Attributes:
        line: The magic that takes it; empty: it is the current plan.
        changes: What would be different, a line for each setting.
    """

    line: str
    changes: list[str]


class Greeting(msgspec.Struct, frozen=True, tag_field="type", tag="greeting"):
    """What a page hears first.

    Attributes:
        protocol: What this kernel speaks.
        version: Of nbdist.
    """

    protocol: int
    version: str


class PageReply(msgspec.Struct, frozen=True, tag_field="type", tag="reply"):
    """The answer to a request.

    Attributes:
        id: The request's number.
        state: How things are now.
        text: What there is to read; empty: nothing.
        failed: Whether the text is an error.
        log: What a "log" has brought.
        variables: What "variables" or "entries" has brought.
        figures: What "figures" has brought, by rank.
        plan: What "plan" has brought: all settings.
        draft: What "plan-draft" has brought.
    """

    id: int
    state: SessionState
    text: str = ""
    failed: bool = False
    log: LogPage | None = None
    variables: list[VariableRow] | None = None
    figures: list[FigureRow] | None = None
    plan: list[PlanField] | None = None
    draft: PlanDraft | None = None


class StateNews(msgspec.Struct, frozen=True, tag_field="type", tag="state"):
    """The session has changed, or the page is new."""

    state: SessionState


class CellsNews(msgspec.Struct, frozen=True, tag_field="type", tag="cells"):
    """Cells have begun or ended, or the page is new."""

    cells: list[CellRan]


class BarsNews(msgspec.Struct, frozen=True, tag_field="type", tag="bars"):
    """A rank's own progress bars in a cell that a page looks at.

    Attributes:
        id: Of the cell, as the page runs it with.
        rank: Whose they are.
        bars: By the lines that stand for those of several ranks.
        whole: Whether these are all.
    """

    id: str
    rank: int
    bars: dict[str, str]
    whole: bool


class FrameNews(msgspec.Struct, frozen=True, tag_field="type", tag="frame"):
    """All that the page's panel shows."""

    frame: PanelFrame


News: TypeAlias = Greeting | PageReply | StateNews | CellsNews | BarsNews | FrameNews | PanelNews
