"""The command `nbdist`: what is done outside of a notebook."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nbdist.errors import NbdistError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What was typed; None: this process's.

    Returns:
        The exit code.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["serve"]:
        return _serve(_parser().parse_args(typed))
    typed, for_script = _divided(typed)
    parsed = _parser().parse_args(typed)
    if for_script:
        if parsed.run is not _run:
            print("nbdist: only `nbdist run SCRIPT.py` takes arguments after --", file=sys.stderr)
            return 2
        parsed.arguments = for_script
    try:
        return int(parsed.run(parsed))
    except NbdistError as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2


def _divided(typed: list[str]) -> tuple[list[str], list[str]]:
    """Return what is for nbdist, and what stands after `--`, for the script."""
    if "--" not in typed:
        return typed, []
    place = typed.index("--")
    return typed[:place], typed[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nbdist", description="One notebook, every GPU. Commands for a terminal.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    join = verbs.add_parser("join", help="make this machine a node of a session on another machine")
    join.add_argument("address", metavar="HOST:PORT", help="the address that `%%distributed start --num-nodes` printed")
    join.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the token, or one for each node of a job (default: NBDIST_TOKEN); -: stdin",
    )
    join.add_argument("--token-line", type=int, default=0, help=argparse.SUPPRESS)  # Slurm gives all tasks one stdin
    join.add_argument("--wait", type=float, default=0.0, metavar="S", help="seconds to wait for the session to listen")
    join.set_defaults(run=_join)
    doctor = verbs.add_parser("doctor", help="check whether this machine can be a node, and what would fail")
    doctor.add_argument(
        "address", metavar="HOST:PORT", nargs="?", default="", help="also test the connection to a session"
    )
    doctor.set_defaults(run=_examine)
    list_ = verbs.add_parser("ls", help="show your sessions and jobs on this machine")
    list_.set_defaults(run=_list)
    look = verbs.add_parser("look", help="look into a job that torchrun, srun, or another launcher has started")
    look.add_argument(
        "name", metavar="JOB", nargs="?", default="", help="its name in `nbdist ls` (default: the only one)"
    )
    look.add_argument("--stacks", action="store_true", help="show where each rank is, with equal stacks grouped")
    look.add_argument("--locals", action="store_true", help="show the names in the function that each rank is in")
    look.add_argument(
        "--flight",
        type=int,
        nargs="?",
        const=20,
        default=0,
        metavar="N",
        help="show the last N collectives (default: 20)",
    )
    look.add_argument(
        "--run",
        dest="codes",
        action="append",
        default=[],
        metavar="CODE",
        help="pause all ranks after the same step, and run this there; -: from stdin; may be repeated",
    )
    look.add_argument("-r", "--ranks", default="all", help="with --run: which ranks, for example 0,2-3 (default: all)")
    look.add_argument(
        "--for",
        dest="limit",
        default="60s",
        metavar="TIME",
        help="with --run: how long the ranks may be paused at most: 90s, 5m (default: 60s)",
    )
    look.set_defaults(run=_look)
    serve = verbs.add_parser("serve", help="run a script so that `nbdist look` shows what it does")
    serve.add_argument(
        "--control", action="store_true", help="allow `nbdist look --run`, which pauses it and runs code"
    )
    serve.add_argument("script", metavar="SCRIPT.py")
    serve.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")
    env = verbs.add_parser("env", help="print variables with which ranks answer `nbdist look`, as their script starts")
    env.add_argument("--control", action="store_true", help="allow `nbdist look --run`, too")
    env.set_defaults(run=_show_variables)
    attach = verbs.add_parser("attach", help="take over a session: a prompt whose cells run on its ranks")
    attach.add_argument("name", metavar="SESSION", nargs="?", help="its name in `nbdist ls` (default: the only one)")
    attach.add_argument(
        "--take", action="store_true", help="take it even from a notebook that is using it, which then loses it"
    )
    attach.set_defaults(run=_attach)
    save = verbs.add_parser("save", help="save a session that no notebook is attached to")
    save.add_argument("name", metavar="SESSION", help="its name in `nbdist ls`, or the beginning of the name")
    save.add_argument("directory", metavar="DIR", nargs="?", help="where saves are (default: as in `start --save`)")
    save.add_argument("--keep", type=int, default=2, metavar="N", help="how many saves may stay there (default: 2)")
    save.add_argument("--stop", action="store_true", help="stop first what ranks run, at the same step if they train")
    save.add_argument("--left", type=float, help=argparse.SUPPRESS)  # seconds that ranks go on without a client
    save.set_defaults(run=_save)
    follow = verbs.add_parser("follow", help="watch a session that another notebook is using; Ctrl-C leaves")
    follow.add_argument("name", metavar="SESSION", nargs="?", help="its name in `nbdist ls` (default: the only one)")
    follow.set_defaults(run=_follow)
    stop = verbs.add_parser("stop", help="end sessions, with all their ranks on all machines")
    stop.add_argument(
        "names", metavar="SESSION", nargs="*", help="its name in `nbdist ls`, or the beginning of the name"
    )
    stop.add_argument("--all", action="store_true", help="end all of your sessions on this machine")
    stop.set_defaults(run=_stop)
    mcp = verbs.add_parser("mcp", help="let agents use your sessions, by the Model Context Protocol on stdio")
    mcp.add_argument("--read-only", action="store_true", help="offer only tools that change nothing")
    mcp.add_argument(
        "--http",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="listen on 127.0.0.1 instead, for those who know the token (default: any free port)",
    )
    mcp.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the token for --http (default: NBDIST_MCP_TOKEN, else a new one is printed)",
    )
    mcp.add_argument("--keep", action="store_true", help="sessions that agents have started outlive this command")
    mcp.set_defaults(run=_mcp)
    export = verbs.add_parser("export", help="write a notebook as a script for torchrun")
    export.add_argument("notebook", metavar="NOTEBOOK.ipynb")
    export.add_argument("script", metavar="SCRIPT.py", help="where to write it")
    export.add_argument("--as-run", action="store_true", help="in the order in which the cells were run last")
    export.add_argument("--sbatch", action="store_true", help="also write a batch script for Slurm: SCRIPT.sbatch")
    export.add_argument("--force", action="store_true", help="overwrite existing files")
    export.set_defaults(run=_export)
    run = verbs.add_parser("run", help="run a script on ranks, or a notebook from top to end")
    run.add_argument("file", metavar="SCRIPT.py|NOTEBOOK.ipynb")
    run.add_argument("output", metavar="OUT.ipynb", nargs="?", help="where to save the notebook with its outputs")
    run.add_argument("-n", "--num-processes", type=int, metavar="N", help="number of ranks (default: one per GPU)")
    run.add_argument("--on", metavar="PROFILE", help="on the machines of a profile, with -n ranks on each")
    run.add_argument(
        "-p",
        "--parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a variable of the notebook's cell tagged `parameters`",
    )
    run.add_argument("--force", action="store_true", help="overwrite OUT.ipynb")
    run.set_defaults(run=_run, arguments=[])
    return parser


def _list(parsed: argparse.Namespace) -> int:
    from nbdist.jobs.found_jobs import find_jobs
    from nbdist.jobs.job_report import list_jobs
    from nbdist.visits import sessions, table

    found, jobs = sessions(), find_jobs()
    print(table(found) if found else "you have no sessions on this machine")
    if jobs:
        print(f"\n{list_jobs(jobs)}")
    return 0


def _look(parsed: argparse.Namespace) -> int:
    from nbdist.jobs.job_report import named_job, report

    if parsed.codes:
        return _run_in_job(parsed)
    print(report(named_job(parsed.name), stacks=parsed.stacks, collectives=parsed.flight, names=parsed.locals))
    return 0


def _run_in_job(parsed: argparse.Namespace) -> int:
    from nbdist.base.text import parse_duration
    from nbdist.jobs.job_code import run_in_job
    from nbdist.jobs.job_report import named_job

    limit = parse_duration(parsed.limit)
    if limit is None:
        raise UsageError(f"invalid time {parsed.limit!r} after --for: use, for example, 90s or 5m")
    codes = [sys.stdin.read() if code == "-" else code for code in parsed.codes]
    try:
        done = run_in_job(named_job(parsed.name), codes, parsed.ranks, limit)
    except KeyboardInterrupt:
        print("nbdist: interrupted; all ranks go on", file=sys.stderr)
        return 130
    print(f"{done.text}{done.report}{done.pause}")
    return 1 if done.failures else 0


def _serve(parsed: argparse.Namespace) -> int:
    """Run a script. What it raises is for its launcher, so it is not caught here."""
    from nbdist.serving.served_script import read_script, serve_script

    try:
        code = read_script(parsed.script, control=parsed.control)
    except UsageError as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2
    serve_script(code, parsed.script, parsed.arguments)
    return 0


def _show_variables(parsed: argparse.Namespace) -> int:
    from nbdist.serving.served_script import variables_for_jobs

    print(f"export {' '.join(variables_for_jobs(control=parsed.control))}")
    return 0


def _attach(parsed: argparse.Namespace) -> int:
    from nbdist.client.magics.terminal import prompt

    prompt(parsed.name, take=parsed.take)
    return 0


def _save(parsed: argparse.Namespace) -> int:
    from nbdist.client.magics.terminal import save

    save(parsed.name, parsed.directory, keep=parsed.keep, stop=parsed.stop, left=parsed.left)
    return 0


def _follow(parsed: argparse.Namespace) -> int:
    from nbdist.client.magics.terminal import follow

    follow(parsed.name)
    return 0


def _stop(parsed: argparse.Namespace) -> int:
    from nbdist.visits import stop

    if bool(parsed.names) == parsed.all:
        raise UsageError("name the sessions to end, as shown by `nbdist ls`, or pass --all")
    for name in stop(parsed.names):
        print(f"session {name} has ended")
    return 0


def _mcp(parsed: argparse.Namespace) -> int:
    from nbdist.mcp_server.agent_server import serve

    if parsed.token_file is not None and parsed.http is None:
        raise UsageError("--token-file is for --http: on stdio there is no token")
    return serve(read_only=parsed.read_only, port=parsed.http, token_file=parsed.token_file, keep=parsed.keep)


def _export(parsed: argparse.Namespace) -> int:
    from nbdist.export.exporting import export

    done = export(
        Path(parsed.notebook), Path(parsed.script), as_run=parsed.as_run, sbatch=parsed.sbatch, force=parsed.force
    )
    for note in done.notes:
        print(note, file=sys.stderr)
    print(f"wrote {' and '.join(map(str, done.files))}. Run it with: {done.command}")
    return 0


def _run(parsed: argparse.Namespace) -> int:
    from nbdist.program import run_notebook, run_script

    file = Path(parsed.file)
    if file.suffix != ".ipynb":
        if parsed.output or parsed.parameters:
            raise UsageError(
                f"{file} is a script: pass its arguments after --, as in `nbdist run {file} -n 2 -- --lr 0.1`"
            )
        return run_script.run(file, parsed.arguments, parsed.num_processes, parsed.on)
    if parsed.arguments:
        raise UsageError("a notebook takes parameters, not arguments after --: `-p lr 0.1`")
    output = Path(parsed.output or file.with_name(f"{file.stem}.out.ipynb"))
    parameters = dict(parsed.parameters)
    return run_notebook.run(file, output, parameters, parsed.num_processes, parsed.on, force=parsed.force)


def _examine(parsed: argparse.Namespace) -> int:
    from nbdist.cluster.doctor import examine

    levels = set()
    for finding in examine(parsed.address):
        mark = {"ok": " ", "note": "?", "problem": "!"}[finding.level]
        print(f"{mark} {finding.subject:14} {finding.text}", flush=True)
        levels.add(finding.level)
    return 1 if "problem" in levels else 0


def _join(parsed: argparse.Namespace) -> int:
    from nbdist.cluster import folding, joining, launchers

    tokens = _tokens(parsed)
    if parsed.token_file == "-":
        return joining.join(parsed.address, tokens, parsed.wait, leash=sys.stdin.fileno())
    place = launchers.job_place(os.environ)
    chosen = launchers.tokens_to_try(tokens, place)
    if place is None:
        return joining.join(parsed.address, chosen, parsed.wait)
    if note := launchers.binding(place):
        print(note, flush=True)
    node = "" if place.node is None else str(place.node)
    name = folding.name_of(parsed.address, node, *tokens)
    return folding.once(name, lambda: joining.join(parsed.address, chosen, parsed.wait))


def _tokens(parsed: argparse.Namespace) -> list[str]:
    """Return the tokens that the user has given: one, or one for each node of a job.

    Raises:
        UsageError: There is none.
    """
    from nbdist.wire.processes.nodes import TOKEN_VARIABLE

    given = _read(parsed.token_file, parsed.token_line) if parsed.token_file else os.environ.get(TOKEN_VARIABLE, "")
    if tokens := given.replace(",", " ").split():
        return tokens
    raise UsageError(
        f"no token: paste the whole line that `%distributed start` prints ({TOKEN_VARIABLE}=... nbdist join ...), "
        "or name a file that holds it with --token-file"
    )


def _read(name: str, line: int) -> str:
    try:
        if name == "-":
            return [sys.stdin.readline() for _ in range(line + 1)][-1]
        with open(name) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token can't be read from {name}: {error}") from None
