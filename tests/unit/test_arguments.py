from __future__ import annotations

import argparse

import pytest

from nbdist.base.text import split_commas
from nbdist.client.magic_lines import magic_line
from nbdist.client.magic_lines.magic_line import HelpShown, MagicParser, suggest_verb
from nbdist.client.magic_lines.parsers import verb_parsers
from nbdist.errors import UsageError


@pytest.fixture
def parser() -> MagicParser:
    parser = MagicParser("%distributed fly", "Fly somewhere.", number="-n")
    parser.add_argument("where", nargs="?", choices=("up", "down"))
    parser.add_argument("-n", "--number", type=magic_line.count, metavar="N", help="how many")
    parser.add_argument("--limit", type=magic_line.seconds, metavar="S")
    parser.add_argument("--names", type=split_commas)
    parser.add_argument("--as", dest="target", type=magic_line.variable)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--secret", action="store_true", help=argparse.SUPPRESS)
    return parser


def test_flags_and_values_are_read_as_a_shell_would(parser: MagicParser) -> None:
    read = parser.read("-n 3 --limit=1.5 --names 'a, b' --as loss --fast")
    assert (read.number, read.limit, read.names) == (3, 1.5, ["a", "b"])
    assert (read.target, read.fast) == ("loss", True)


def test_a_comment_at_the_end_of_a_line_is_not_read(parser: MagicParser) -> None:
    assert parser.read("-n 3  # that's enough").number == 3
    assert parser.read("# nothing").number is None


def test_a_number_sign_inside_a_word_or_quotes_begins_no_comment(parser: MagicParser) -> None:
    with pytest.raises(UsageError, match="'a#b' is not a variable name"):
        parser.read("--as a#b")
    assert parser.read("--names 'a, #b'").names == ["a", "#b"]


@pytest.mark.parametrize("line", ["--help", "-h", "-n 3 --help", "--nonsense -h"])
def test_help_is_shown_whatever_else_stands_there(parser: MagicParser, line: str) -> None:
    with pytest.raises(HelpShown, match="Fly somewhere"):
        parser.read(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 0", "invalid number of ranks '0'"),
        ("-n 1.5", "invalid number of ranks '1.5'"),
        ("-n ²", "invalid number of ranks '²'"),
        ("--limit 0", "invalid duration '0'"),
        ("--limit nan", "invalid duration 'nan'"),
        ("--limit inf", "invalid duration 'inf'"),
        ("--limit -1", "invalid duration '-1'"),
        ("--as a-b", "'a-b' is not a variable name"),
        ("--as class", "'class' is not a variable name"),
        ("sideways", "sideways"),
        ("--fas", "did you mean --fast"),
        ("--fats", "did you mean --fast"),
        ("-n 3 --number=4", "-n is given twice"),
        ("--fast --fast", "--fast is given twice"),
        ("--n 3", "did you mean -n?"),
        ("up 3", "did you mean `%distributed fly -n 3`?"),
        ("up ''", "'' is an unexpected argument."),
        ("-n 'x", "No closing quotation"),
    ],
)
def test_what_is_wrong_is_one_usage_error_that_names_the_magic(parser: MagicParser, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser.read(line)
    assert message in str(caught.value) and str(caught.value).startswith("%distributed fly")


def test_secret_flags_are_not_offered(parser: MagicParser) -> None:
    with pytest.raises(UsageError) as caught:
        parser.read("--zzz")
    assert "--fast" in str(caught.value) and "--secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["up", "down", "--help", "--number", "--limit", "--names", "--as", "--fast"]),
        ("--fast ", ["up", "down", "--help", "--number", "--limit", "--names", "--as"]),
        ("--fast --n", ["up", "down", "--help", "--number", "--limit", "--names", "--as"]),
        ("--limit ", []),
        ("-n 2", []),
    ],
)
def test_what_may_come_next_is_suggested(parser: MagicParser, typed: str, offered: list[str]) -> None:
    assert parser.suggest(typed) == offered


def test_an_unknown_verb_suggests_the_nearest_and_lists_all() -> None:
    assert suggest_verb("stats", ["start", "status"]) == (
        "%distributed has no verb 'stats': did you mean `%distributed status`? Available verbs: start, status."
    )
    assert suggest_verb("xyzzy", ["start"]) == "%distributed has no verb 'xyzzy'. Available verbs: start."


def test_ranks_may_be_told_not_to_outlive_the_kernel() -> None:
    start = verb_parsers()["start"]
    assert start.read("-n 2 --linger 0").linger == 0
    assert start.read("-n 2 --linger 12h").linger == 12 * 3600
    for wrong in ("-1", "x", "12w", "1e3", "99999999d"):
        with pytest.raises(UsageError, match=f"invalid duration '{wrong}': use, for example, 0, 90, 15m, or 12h"):
            start.read(f"-n 2 --linger={wrong}")
