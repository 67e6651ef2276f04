"""The arguments of each magic: flags, values and help. Parses only."""

from __future__ import annotations

import argparse

from nbdist.client.costs.cell_memory import MODES
from nbdist.client.magic_lines.magic_line import (
    MagicParser,
    item,
    linger,
    number,
    seconds,
    span_above_zero,
    variable,
    variable_item,
)
from nbdist.client.magic_lines.plan_line import plan_parser
from nbdist.client.magic_lines.start_flags import add_start_flag, add_start_flags
from nbdist.client.reports.flight import COUNT
from nbdist.client.saving.save import KEEP
from nbdist.metrics.allocation.memory_snapshot import EVENTS


def cell_parser() -> MagicParser:
    """Return the parser for `%%distributed`."""
    parser = MagicParser("%%distributed", "Run the cell on all ranks.", number="-r")
    _add_ranks(parser)
    parser.add_argument(
        "--background",
        "-b",
        action="store_true",
        help="return immediately with a handle: .done .wait() .output .interrupt()",
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="interrupt the ranks after S seconds")
    parser.add_argument(
        "--grace",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds that ranks may wait in a collective for one that raised (default: 1)",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="show errors only")
    parser.add_argument(
        "--capture",
        type=variable,
        metavar="NAME",
        help="keep the output as NAME[rank].stdout, .stderr, .outputs, .result, .error; don't show it",
    )
    parser.add_argument("--tee", action="store_true", help="with --capture: show it too")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="write one trace of all ranks (FILE.json or FILE.json.gz), and show where time was spent",
    )
    parser.add_argument(
        "--setup", action="store_true", help="new ranks run this cell first (`%%distributed heal`, `grow`)"
    )
    parser.add_argument("--auto", action="store_true", help=argparse.SUPPRESS)
    return parser


def verb_parsers() -> dict[str, MagicParser]:
    """Return the parser for each verb of `%distributed`, in the order in which the help lists them."""
    return {
        "start": _start(),
        "attach": _attach(),
        "detach": _detach(),
        "follow": _follow(),
        "stop": _stop(),
        "restart": _restart(),
        "save": _save(),
        "status": _status(),
        "auto": _auto(),
        "plan": plan_parser(),
        "push": _push(),
        "pull": _pull(),
        "logs": _logs(),
        "memory": _memory(),
        "free": _free(),
        "panel": _panel(),
        "tflops": _tflops(),
        "why": MagicParser("%distributed why", "Show why the last cell's training steps took as long as they did."),
        "advise": _advise(),
        "peak": _peak(),
        "interrupt": _interrupt(),
        "heal": _heal(),
        "shrink": _shrink(),
        "grow": _grow(),
        "debug": _debug(),
        "snapshot": _snapshot(),
        "stacks": _stacks(),
        "flight": _flight(),
        "look": _look(),
        "variables": _variables(),
    }


def _start() -> MagicParser:
    parser = MagicParser("%distributed start", "Start ranks.", number="-n")
    add_start_flags(parser)
    parser.add_argument(
        "--replace", action="store_true", help="first stop the session that is running or that a crash left behind"
    )
    parser.add_argument(
        "--from",
        dest="directory",
        metavar="DIR",
        help="start from what `%%distributed save DIR` has saved: its cells, its training, the names of its ranks",
    )
    return parser


def _save() -> MagicParser:
    what = "Save the session: the names of its ranks, its training and its cells. `start --from` starts from it."
    parser = MagicParser("%distributed save", what)
    parser.add_argument("directory", metavar="DIR", help="where saves are, on a file system that all ranks share")
    parser.add_argument(
        "--keep", type=number, default=KEEP, metavar="N", help=f"how many saves may stay there (default: {KEEP})"
    )
    parser.add_argument(
        "--stop", action="store_true", help="first stop what ranks run: after the same step on all, if they train"
    )
    return parser


def _attach() -> MagicParser:
    what = "Take over a session whose notebook is gone: its ranks, running cells, and the output you missed."
    parser = MagicParser("%distributed attach", what)
    parser.add_argument("name", nargs="?", metavar="SESSION", help="its name in `nbdist ls` (default: the only one)")
    parser.add_argument(
        "--take", action="store_true", help="take it even from a notebook that is using it, which then loses it"
    )
    parser.add_argument("--wait", action="store_true", help="stay in this cell until the running cells have ended")
    return parser


def _follow() -> MagicParser:
    what = "Watch a session that another notebook is using: its cells, their output, how they end."
    parser = MagicParser("%distributed follow", what)
    parser.add_argument("name", nargs="?", metavar="SESSION", help="its name in `nbdist ls` (default: the only one)")
    parser.add_argument("--wait", action="store_true", help="stay in this cell until the session ends; Ctrl-C leaves")
    parser.add_argument("--stop", action="store_true", help="stop following")
    return parser


def _detach() -> MagicParser:
    parser = MagicParser(
        "%distributed detach",
        "Leave the ranks running, and give up the session: you can attach to it later, or from elsewhere.",
    )
    parser.add_argument(
        "--linger",
        type=linger,
        metavar="TIME",
        help="how long they keep running alone: 90, 15m, 12h (default: as given to `start`)",
    )
    return parser


def _stop() -> MagicParser:
    return MagicParser("%distributed stop", "Stop the ranks.")


def _restart() -> MagicParser:
    what = "End the ranks and start fresh ones; their variables are lost."
    parser = MagicParser("%distributed restart", what, number="-n")
    add_start_flag(parser, "num_processes")
    return parser


def _status() -> MagicParser:
    return MagicParser("%distributed status", "Show every rank: its device, memory and what it runs.")


def _auto() -> MagicParser:
    parser = MagicParser("%distributed auto", "Turn on or off that every cell runs on all ranks.")
    parser.add_argument("state", choices=("on", "off"), metavar="on|off")
    return parser


def _push() -> MagicParser:
    parser = MagicParser("%distributed push", "Copy variables from the notebook to ranks.")
    parser.add_argument("names", nargs="+", type=variable_item, metavar="NAME")
    _add_ranks(parser)
    return parser


def _pull() -> MagicParser:
    parser = MagicParser(
        "%distributed pull",
        "Copy variables from ranks to the notebook: a list ordered by rank, or the value of a single rank.",
    )
    parser.add_argument("names", nargs="+", type=item, metavar="NAME")
    _add_ranks(parser)
    parser.add_argument("--as", dest="target", type=variable, metavar="NAME", help="name in the notebook")
    return parser


def _logs() -> MagicParser:
    parser = MagicParser("%distributed logs", "Show everything a cell printed on ranks, by default the newest cell.")
    _add_ranks(parser)
    parser.add_argument("--cell", type=number, metavar="N", help="the cell's number")
    parser.add_argument("--tail", type=number, metavar="LINES", help="only the last LINES lines of each rank")
    parser.add_argument("--save", metavar="FILE", help="write it to a file")
    return parser


def _memory() -> MagicParser:
    parser = MagicParser("%distributed memory", "Show below each cell what it cost in memory, here or on the ranks.")
    parser.add_argument(
        "mode",
        nargs="?",
        choices=MODES,
        help="on: a table; compact: one line; off: nothing. If omitted: show the last cell's figures",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="show what is held now: parameters, gradients, optimizer state, and the rest",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="with --batch: show what one training step of this model holds at its peak, by module",
    )
    parser.add_argument("--batch", metavar="NAME", help="with --model: a micro-batch for it")
    _add_ranks(parser)
    return parser


def _free() -> MagicParser:
    return MagicParser(
        "%distributed free",
        "Free memory that only tracebacks, Out, and caches hold: on all ranks, or in the notebook if there are none.",
    )


def _panel() -> MagicParser:
    parser = MagicParser("%distributed panel", "Show memory, speed and health of every rank, live.")
    parser.add_argument("--rate", type=seconds, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--text", action="store_true", help="print one text table")
    return parser


def _tflops() -> MagicParser:
    parser = MagicParser("%distributed tflops", "Show below each cell what its training steps took: time, TFLOPS, MFU.")
    parser.add_argument("state", nargs="?", choices=("on", "off"))
    return parser


def _advise() -> MagicParser:
    what = "Measure what would make the last training steps faster: other sizes, other options of the DataLoader."
    parser = MagicParser("%distributed advise", what)
    parser.add_argument(
        "-r", "--ranks", metavar="RANK", help="the rank to measure on (default: the one that waited longest for data)"
    )
    parser.add_argument("--seconds", type=seconds, default=20.0, metavar="S", help="approximate duration (default: 20)")
    return parser


def _peak() -> MagicParser:
    parser = MagicParser(
        "%distributed peak",
        "Measure the peak rate of matrix products, on all ranks at the same time, or here if there are none.",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "tf32", "fp16", "bf16", "fp64"),
        help="data type (default: those of the last steps whose peak is unknown, else fp32 on a CPU, bf16 on a GPU)",
    )
    parser.add_argument("--seconds", type=seconds, default=2.0, metavar="S", help="duration (default: 2)")
    return parser


def _interrupt() -> MagicParser:
    parser = MagicParser(
        "%distributed interrupt",
        "Stop the running cells: after the current step if they train, otherwise with KeyboardInterrupt.",
    )
    _add_ranks(parser)
    parser.add_argument("--now", action="store_true", help="don't wait for the step or a collective to end")
    return parser


def _heal() -> MagicParser:
    parser = MagicParser(
        "%distributed heal", "Replace ranks that have died; the others keep their variables, groups and models."
    )
    parser.add_argument(
        "-r", "--ranks", metavar="RANKS", help="which ranks, for example 0,2-3 (default: the dead ones)"
    )
    parser.add_argument(
        "--kill", action="store_true", help="end these ranks first, for example one that is stuck for good"
    )
    return parser


def _shrink() -> MagicParser:
    parser = MagicParser(
        "%distributed shrink",
        "Continue with fewer ranks: without those that have died, and without those that you name.",
    )
    parser.add_argument("-r", "--ranks", metavar="RANKS", help="remove these ranks, too; their variables are lost")
    return parser


def _grow() -> MagicParser:
    parser = MagicParser("%distributed grow", "Add ranks; they run the setup cells first.", number="-n")
    parser.add_argument(
        "-n", type=number, default=1, metavar="N", help="number of new ranks on each machine (default: 1)"
    )
    parser.add_argument(
        "-r",
        "--ranks",
        metavar="@NODE",
        help="only on this machine, or on the machines of these ranks (default: on all machines)",
    )
    parser.add_argument(
        "--num-nodes",
        type=number,
        default=0,
        metavar="K",
        help="add K other machines, which then join the session, and add the ranks there",
    )
    return parser


def _debug() -> MagicParser:
    parser = MagicParser("%distributed debug", "Debug the last failure of a rank with IPython's debugger.")
    parser.add_argument("-r", "--ranks", metavar="RANK", help="which rank (default: the one that failed first)")
    parser.add_argument(
        "--debugpy", action="store_true", help="have the ranks wait for VS Code's debugger, and show its configuration"
    )
    return parser


def _snapshot() -> MagicParser:
    parser = MagicParser("%distributed snapshot", "Write torch's snapshot of the device memory, a file for each rank.")
    _add_ranks(parser)
    parser.add_argument(
        "--record", action="store_true", help="record allocations from now on, so that snapshots show their stacks"
    )
    parser.add_argument("--stop", action="store_true", help="stop recording")
    parser.add_argument(
        "--events",
        type=number,
        default=EVENTS,
        metavar="N",
        help=f"how many events each rank keeps (default: {EVENTS:,}, about 1 KB each)",
    )
    return parser


def _stacks() -> MagicParser:
    parser = MagicParser("%distributed stacks", "Show where the ranks are: their stacks, with equal stacks grouped.")
    _add_ranks(parser)
    parser.add_argument("--native", action="store_true", help="include frames of C code (needs py-spy)")
    return parser


def _flight() -> MagicParser:
    what = "Show the last collectives of each rank side by side, and mark the first difference."
    parser = MagicParser("%distributed flight", what)
    _add_ranks(parser)
    parser.add_argument(
        "--last", type=number, default=COUNT, metavar="N", help=f"number of collectives (default: {COUNT})"
    )
    return parser


def _look() -> MagicParser:
    what = "Look into a job on this machine that torchrun, srun, or another launcher has started; run code in it."
    parser = MagicParser("%distributed look", what)
    parser.add_argument(
        "name", nargs="?", default="", metavar="JOB", help="its name in `nbdist ls` (default: the only one)"
    )
    parser.add_argument("--stacks", action="store_true", help="show where each rank is, with equal stacks grouped")
    parser.add_argument("--locals", action="store_true", help="show the names in the function that each rank is in")
    parser.add_argument(
        "--flight",
        type=number,
        nargs="?",
        const=COUNT,
        default=0,
        metavar="N",
        help=f"show the last N collectives (default: {COUNT})",
    )
    parser.add_argument(
        "--run", metavar="CODE", help="pause all ranks after the same step, and run this there, in quotes"
    )
    _add_ranks(parser)
    parser.add_argument(
        "--for",
        dest="limit",
        type=span_above_zero,
        default=60.0,
        metavar="TIME",
        help="with --run: how long the ranks may be paused at most: 90s, 5m (default: 60s)",
    )
    return parser


def _variables() -> MagicParser:
    what = "Show the variables of the ranks, and whether their values agree to the bit."
    parser = MagicParser("%distributed variables", what, paths=True)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="show only this variable, and what differs in it: w, state['w'], model.head.bias",
    )
    _add_ranks(parser)
    parser.add_argument("--diff", metavar="RANKS", help="compare a tensor on two ranks, for example 0,3")
    return parser


def _add_ranks(parser: MagicParser) -> None:
    parser.add_argument("-r", "--ranks", metavar="RANKS", help="which ranks, for example 0,2-3 (default: all)")
