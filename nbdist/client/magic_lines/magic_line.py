"""Parses magic lines: every wrong flag or value becomes one clear UsageError. Independent of sessions."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from nbdist.base.checks import LONGEST
from nbdist.base.text import did_you_mean, parse_duration
from nbdist.errors import UsageError

_PATH = re.compile(r"""(?<![\w"'])[^\W\d]\w*(?:\.\w+|\[(?:'[^']*'|"[^"]*"|[^]'"])*\])+""")
_QUOTED_OR_COMMENT = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?:^|(?<=\s))(?P<comment>\#)""")


class HelpShown(Exception):
    """Raised for `--help`, with the help as its text."""


class MagicParser(argparse.ArgumentParser):
    """argparse for a magic's line: raises instead of exiting the process.

    Args:
        magic: The magic, as the user types it.
        description: What it does.
        number: The flag to suggest for a number without a flag; "" for none.
        paths: Whether it takes entries of variables, written as in Python: state['layer.weight'].
    """

    def __init__(self, magic: str, description: str, number: str = "", *, paths: bool = False) -> None:
        super().__init__(prog=magic, description=description, add_help=False, allow_abbrev=False, formatter_class=_Help)
        self._number = number
        self._paths = paths
        self.add_argument("-h", "--help", action="store_true", help="show this")

    def read(self, line: str) -> argparse.Namespace:
        """Return the arguments in a line.

        Raises:
            UsageError: Something in it is invalid.
            HelpShown: It asks for help.
        """
        try:
            line = without_comment(line)
            words = shlex.split(_PATH.sub(lambda found: shlex.quote(found[0]), line) if self._paths else line)
        except ValueError as error:
            raise UsageError(f"{self.prog}: {error} in {line!r}. `{self.prog} --help` shows what is allowed.") from None
        if "-h" in words or "--help" in words:
            raise HelpShown(self.format_help())
        for word in words:  # before argparse takes its value for something else
            if word.startswith("--") and word.split("=")[0] not in {"--", *self._option_string_actions}:
                raise UsageError(self._explain_unknown(word))
        self._check_repeated(words)
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            raise UsageError(self._explain_unknown(unknown[0]))
        return arguments

    def suggest(self, typed: str) -> list[str]:
        """Return completions for the end of a line: flags, and the allowed values."""
        words = typed.split()
        if words and not typed[-1].isspace():
            words.pop()
        flag = self._option_string_actions.get(words[-1]) if words else None
        if flag is not None and flag.nargs is None:  # its value comes next
            return [str(choice) for choice in flag.choices or ()]
        open_actions = [action for action in self._actions if not set(action.option_strings) & set(words)]
        shown = [action for action in open_actions if action.help != argparse.SUPPRESS]
        flags = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        choices = [str(choice) for action in shown if not action.option_strings for choice in action.choices or ()]
        return [*choices, *flags]

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError; argparse calls this when a value is invalid."""
        raise UsageError(f"{self.prog}: {message}. `{self.prog} --help` shows what is allowed.")

    def _check_repeated(self, words: Sequence[str]) -> None:
        """Reject a flag given twice, of which argparse would silently take the last."""
        actions = [self._option_string_actions.get(word.split("=")[0]) for word in words if word.startswith("-")]
        for action in actions:
            if action is not None and actions.count(action) > 1:
                flag = action.option_strings[0]
                raise UsageError(f"{self.prog}: {flag} is given twice; give it once: `{self.prog} --help` shows how.")

    def _explain_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            flag = self._number if word[:1].isdigit() else ""
            meant = f": did you mean `{self.prog} {flag} {word}`?" if flag else "."
            return f"{self.prog}: {word!r} is an unexpected argument{meant} `{self.prog} --help` shows what is allowed."
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        known = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        typed = word.split("=", maxsplit=1)[0]
        short = [flag for flag in self._option_string_actions if flag == typed[1:]]
        hint = f": did you mean {short[0]}?" if short else did_you_mean(typed, known, "{}")
        return f"{self.prog}: unknown option {word}{hint} Available options: {', '.join(known)}."


def without_comment(line: str) -> str:
    """Return a magic's line without the `# comment` at its end. A # inside a word or quotes starts no comment."""
    comment = next((found for found in _QUOTED_OR_COMMENT.finditer(line) if found["comment"]), None)
    return line if comment is None else line[: comment.start()].rstrip()


class _Help(argparse.HelpFormatter):
    """As wide as the table of verbs, not as a terminal that does not exist."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def count(text: str) -> int:
    """Parse a number of ranks."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number of ranks {text!r}: use 1 or more, for example -n 2")
    return int(text)


def number(text: str) -> int:
    """Parse another number: of lines, or of a cell."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: use 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """Parse a duration greater than 0."""
    value = _float(text)
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"invalid duration {text!r}: use a number of seconds greater than 0, for example 60"
        )
    return value


def linger(text: str) -> float:
    """Parse a duration of 0 or more, with or without a unit."""
    value = parse_duration(text)
    if value is None or value > LONGEST:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r}: use, for example, 0, 90, 15m, or 12h")
    return value


def span_above_zero(text: str) -> float:
    """Parse a duration greater than 0, with or without a unit."""
    value = parse_duration(text)
    if not value or value > LONGEST:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r}: use, for example, 90s, 30m, or 2h")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def item(text: str) -> str:
    """Parse a word of a list that may contain commas: `push x, y`."""
    return text.rstrip(",") or text


def variable(text: str) -> str:
    """Parse a Python name."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    return text


def variable_item(text: str) -> str:
    """Parse a Python name in a list that may contain commas."""
    return variable(item(text))


def suggest_verb(verb: str, verbs: Sequence[str]) -> str:
    """Return the message for a verb that does not exist."""
    hint = did_you_mean(verb, verbs, "`%distributed {}`")
    return f"%distributed has no verb {verb!r}{hint} Available verbs: {', '.join(verbs)}."
