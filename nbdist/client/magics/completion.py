"""Tab, Shift-Tab and `name?` for names on ranks and for the magics' own words, from any front end.

Asks ranks, and answers at once: if they are busy or slow, the last known names are used. Runs nothing on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from IPython.core import page
from IPython.core.completer import Completion
from IPython.core.interactiveshell import InteractiveShell

from nbdist.base import limits
from nbdist.client.magic_lines.magic_line import MagicParser
from nbdist.client.ranks.rank_set import RankSet
from nbdist.client.session.current import get_session
from nbdist.client.session.session import rank_set_of
from nbdist.errors import SessionClosed, UsageError
from nbdist.wire.questions.knowing import Complete, Completions, Inspect, Inspection

_KIND = "nbdist"
_CELL_MAGIC = re.compile(r"\s*%%(distributed|dist|rank)\b([^\n]*)\n")
_CELL_LINE = re.compile(r"\s*%%(distributed|dist|rank)\s+(.*)$")
_VERB_LINE = re.compile(r"\s*%(?:distributed|dist)\s+(.*)$")
_RANKS_FLAG = re.compile(r"(?:-r|--ranks)[=\s]*([\d,\s-]+)")


class Words(Protocol):
    """What completion needs from the magics."""

    @property
    def cell_parser(self) -> MagicParser:
        """The arguments of `%%distributed`."""

    @property
    def verb_parsers(self) -> Mapping[str, MagicParser]:
        """The arguments of each verb of `%distributed`."""

    @property
    def auto(self) -> bool:
        """Whether every cell runs on ranks."""


def install_completion(shell: InteractiveShell, words: Words) -> None:
    """Add completion to a shell. Elsewhere the shell's own completions are unchanged."""
    completer: Any = shell.Completer
    complete: Callable[[str, int], Iterator[Completion]] = completer.completions
    ours = _Completer(shell, words)

    def completions(text: str, offset: int) -> Iterator[Completion]:
        found = ours.complete(text, offset)
        yield from complete(text, offset) if found is None else found

    completer.completions = completions
    _Inspector(shell, words).install()


class _Completer:
    """Completes our magics' lines, and cells that run on ranks."""

    def __init__(self, shell: InteractiveShell, words: Words) -> None:
        self._shell = shell
        self._words = words

    def complete(self, text: str, offset: int) -> list[Completion] | None:
        """Return the completions before `offset`; None if the shell knows better."""
        before = text[:offset]
        line = before.rsplit("\n", 1)[-1]
        if match := _VERB_LINE.match(line):
            return self._complete_verb(match[1], offset)
        if "\n" not in before.lstrip() and (match := _CELL_LINE.match(line)):
            if match[1] == "rank":
                return []
            return _choices(self._words.cell_parser.suggest(match[2]), match[2], offset)
        rank_set = _rank_set()
        if rank_set is None:
            return None
        top = _runs_on_ranks(text, before, self._words.auto)
        if top is None:
            return None
        start, ranks = top
        return _complete_on_ranks(rank_set, before[start:], start, ranks)

    def _complete_verb(self, typed: str, offset: int) -> list[Completion]:
        verb, space, rest = typed.partition(" ")
        parsers = self._words.verb_parsers
        if not space:
            return _choices(sorted(parsers), verb, offset)
        if verb not in parsers:
            return []
        fragment = _last_word(rest)
        if fragment.startswith("-") or verb not in ("push", "pull"):
            return _choices(parsers[verb].suggest(rest), rest, offset)
        return _choices(self._names(verb), rest, offset)

    def _names(self, verb: str) -> list[str]:
        if verb == "pull":
            rank_set = _rank_set()
            return _known_names(rank_set) if rank_set is not None else []
        hidden = self._shell.user_ns_hidden
        return sorted(name for name in self._shell.user_ns if not name.startswith("_") and name not in hidden)


class _Inspector:
    """Documentation of names that only ranks have, and of all names in a cell that runs on ranks."""

    def __init__(self, shell: InteractiveShell, words: Words) -> None:
        self._shell = shell
        self._words = words
        self._on_ranks = False  # whether the inspected cell runs on ranks

    def install(self) -> None:
        """Install it in front of the shell's own."""
        shell: Any = self._shell
        inspect_mime: Any = shell.object_inspect_mime
        inspect: Any = getattr(shell, "_inspect", None)

        def object_inspect_mime(name: str, detail_level: int = 0, omit_sections: Any = ()) -> Any:
            if self._on_ranks and (found := _inspect(name, detail_level)):
                return found
            try:
                return inspect_mime(name, detail_level=detail_level, omit_sections=omit_sections)
            except KeyError:
                if found := _inspect(name, detail_level):
                    return found
                raise

        def inspect_named(method: str, name: str, namespaces: Any = None, **options: Any) -> Any:
            here = method != "pinfo" or shell._object_find(name, namespaces).found
            if not here and (found := _inspect(name, options.get("detail_level", 0))):
                return page.page(found)
            return inspect(method, name, namespaces, **options)

        shell.object_inspect_mime = object_inspect_mime
        if inspect is not None and hasattr(shell, "_object_find"):  # private: without, `name?` looks only in the kernel
            shell._inspect = inspect_named
        if (kernel := getattr(shell, "kernel", None)) is not None:
            self._watch(kernel)

    def _watch(self, kernel: Any) -> None:
        """Note which cell Shift-Tab is pressed in: the kernel passes only the name on."""
        do_inspect = kernel.do_inspect

        def inspect_in_cell(code: str, cursor_pos: int, *args: Any, **options: Any) -> Any:
            self._on_ranks = _runs_on_ranks(code, code[:cursor_pos], self._words.auto) is not None
            try:
                return do_inspect(code, cursor_pos, *args, **options)
            finally:
                self._on_ranks = False

        kernel.do_inspect = inspect_in_cell


def _runs_on_ranks(text: str, before: str, auto: bool) -> tuple[int, str | None] | None:
    """Return where a cell's code for ranks starts, and for which ranks; None if the cell runs in the notebook."""
    if magic := _CELL_MAGIC.match(text):
        if len(before) < magic.end():
            return None
        if magic[1] == "rank":
            return magic.end(), magic[2]
        flag = _RANKS_FLAG.search(magic[2])
        return magic.end(), flag[1] if flag else None
    if auto and not text.lstrip().startswith(("%", "!")):
        return 0, None
    return None


def _complete_on_ranks(rank_set: RankSet, code: str, start: int, ranks: str | None) -> list[Completion]:
    """Ask the first of these ranks that lives and is idle; if none is, use their last known names."""
    chosen = _chosen(rank_set, ranks)
    idle = next((rank for rank in chosen if not rank_set.traffic.running([rank])), None)
    if idle is not None:
        answer = rank_set.traffic.ask([idle], Complete(code, len(code)), timeout=limits.COMPLETION_ANSWER).get(idle)
        if isinstance(answer, Completions):
            return [
                Completion(start + item.start, start + item.end, item.text, type=item.kind) for item in answer.matches
            ]
    fragment = _last_name(code)
    if code[: len(code) - len(fragment)].endswith("."):
        return []
    return _choices(_known_names(rank_set, chosen), fragment, start + len(code))


def _chosen(rank_set: RankSet, ranks: str | None) -> list[int]:
    living = rank_set.living()
    try:
        wanted = rank_set.among(ranks)
    except UsageError:
        wanted = None
    return living if wanted is None else [rank for rank in wanted if rank in living]


def _inspect(name: str, detail: int) -> dict[str, Any] | None:
    """Return the documentation of a name on ranks as a MIME bundle; None if no rank has it."""
    rank_set = _rank_set()
    root = name.split(".", maxsplit=1)[0]
    if rank_set is None or root not in _known_names(rank_set):
        return None
    for rank in rank_set.living():
        if rank_set.traffic.running([rank]) or root not in rank_set.traffic.names.get(rank, []):
            continue
        answer = rank_set.traffic.ask([rank], Inspect(name, detail), timeout=limits.COMPLETION_ANSWER).get(rank)
        if answer is not None:
            return answer.bundle if isinstance(answer, Inspection) else None
    text = f"{root} lives on ranks, which are busy: its documentation is available when they are done"
    return {"text/plain": text, "text/html": f"<pre>{text}</pre>"}


def _known_names(rank_set: RankSet, ranks: list[int] | None = None) -> list[str]:
    chosen = rank_set.traffic.names if ranks is None else ranks
    return sorted({name for rank in chosen for name in rank_set.traffic.names.get(rank, [])})


def _choices(texts: list[str], typed: str, offset: int) -> list[Completion]:
    fragment = _last_word(typed)
    return [Completion(offset - len(fragment), offset, text, type=_KIND) for text in texts if text.startswith(fragment)]


def _last_word(typed: str) -> str:
    return re.split(r"\s", typed)[-1]


def _last_name(code: str) -> str:
    match = re.search(r"\w*$", code)
    return match[0] if match is not None else ""


def _rank_set() -> RankSet | None:
    try:
        return rank_set_of(get_session())
    except SessionClosed:
        return None
