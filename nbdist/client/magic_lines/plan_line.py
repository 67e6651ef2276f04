"""How `%distributed plan` is parsed: the flag of each setting, in both directions. Independent of sessions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from nbdist.base.text import did_you_mean, number_or_text, split_commas
from nbdist.client.magic_lines.magic_line import MagicParser
from nbdist.errors import UsageError
from nbdist.plan import Plan
from nbdist.planning.kinds import (
    STRATEGIES,
    Blocks,
    Choice,
    Kind,
    Methods,
    OptionalSwitch,
    Options,
    Setting,
    Switch,
    Way,
)
from nbdist.planning.settings import SETTINGS

_TRISTATE = {"on": True, "off": False, "default": None}
_STRATEGIES = (*STRATEGIES, "auto")


def plan_parser() -> MagicParser:
    """Return the parser for `%distributed plan`. Its result holds only the settings that were given."""
    parser = _PlanParser("%distributed plan", "Show the plan, or change the given settings.")
    parser.formatter_class = _Help
    parser.usage = "%(prog)s [none | ddp | fsdp | hsdp | deepspeed | auto] [SETTING ...]"
    parser.add_argument(
        "strategy",
        nargs="?",
        type=_strategy,
        choices=_STRATEGIES,
        help="how models are distributed; auto: propose the first that fits the memory",
    )
    parser.add_argument("--reset", action="store_true", help="start from the default plan")
    parser.add_argument(
        "--from",
        dest="source",
        nargs="?",
        const="",
        metavar="FILE",
        help="start from Accelerate's configuration, by default its own",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help='deepspeed: take DeepSpeed\'s configuration (JSON); "auto" in it stays as planned',
    )
    parser.add_argument("--write", metavar="FILE", help="deepspeed: write the plan as DeepSpeed's configuration (JSON)")
    parser.add_argument("--model", metavar="NAME", help="auto: the model, a variable of rank 0")
    parser.add_argument("--batch", metavar="NAME", help="auto: a micro-batch, a variable of rank 0")
    flagged = {name: setting for name, setting in SETTINGS.items() if setting.group}
    groups = {
        title: parser.add_argument_group(title) for title in dict.fromkeys(each.group for each in flagged.values())
    }
    for name, setting in flagged.items():
        how = {"default": argparse.SUPPRESS, "help": setting.help, **_how_to_read(name, setting)}
        groups[setting.group].add_argument(f"--{name.replace('_', '-')}", dest=name, **how)
    return parser


class _PlanParser(MagicParser):
    """Treats a strategy after a setting with an optional value as the strategy: `--compile fsdp`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse like argparse, which would take the strategy for the setting's value."""
        words = list(args)
        for number, word in enumerate(words[:-1]):
            if isinstance(self._option_string_actions.get(word), _Way) and words[number + 1] in _STRATEGIES:
                words[number] = f"{word}=on"
        return super().parse_known_args(words, namespace)

    def suggest(self, typed: str) -> list[str]:
        """Return the values of a setting first, where one may follow."""
        words = typed.split() if typed[-1:].isspace() else typed.split()[:-1]
        is_open = bool(words) and isinstance(self._option_string_actions.get(words[-1]), _Way)
        ways = _ways(self._option_string_actions[words[-1]].dest) if is_open else ()
        return [*ways, *super().suggest(typed)]


def _how_to_read(name: str, setting: Setting) -> dict[str, Any]:
    kind, metavar = setting.kind, setting.metavar
    if isinstance(kind, Switch):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(kind, OptionalSwitch):
        return {"action": _Tristate, "choices": tuple(_TRISTATE)}
    if isinstance(kind, Way):
        return {"action": _Way, "metavar": metavar}
    if isinstance(kind, Choice):
        return {"type": _reader(name, kind), "choices": kind.words}
    if isinstance(kind, Options):
        return {"action": _Options, "nargs": "+", "metavar": metavar}
    return {"type": _classes if isinstance(kind, Blocks | Methods) else _number, "metavar": metavar}


def _ways(name: str) -> tuple[str, ...]:
    kind = SETTINGS[name].kind
    return kind.words if isinstance(kind, Way) else ()


class _Help(argparse.HelpFormatter):
    """One line for each setting."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=72, width=140)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction | _Way):
            value = f" [{action.metavar}]" if isinstance(action, _Way) else ""
            return action.option_strings[0].replace("--", "--[no-]") + value
        return super()._format_action_invocation(action)


class _Tristate(argparse.Action):
    """on, off or default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, _TRISTATE[values])


class _Way(argparse.Action):
    """`--setting`, `--setting WAY` or `--no-setting`."""

    def __init__(self, option_strings: list[str], dest: str, **others: Any) -> None:
        both = [*option_strings, *(flag.replace("--", "--no-") for flag in option_strings)]
        super().__init__(both, dest, nargs="?", **others)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        is_off = option_string.startswith("--no-")
        if values in (None, "on"):
            setattr(namespace, self.dest, not is_off)
        elif is_off:
            parser.error(f"{option_string} takes no value, got {values!r}")
        else:
            setattr(namespace, self.dest, SETTINGS[self.dest].kind.refined(self.dest, values))


class _Options(argparse.Action):
    """NAME=VALUE words, or "none"."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, dict(_option(parser, word) for word in values if values != ["none"]))


def _option(parser: argparse.ArgumentParser, word: str) -> tuple[str, Any]:
    name, separator, value = word.partition("=")
    if not separator:
        parser.error(f"invalid option {word!r}: write NAME=VALUE, for example matrix_approximation_rank=2")
    switches = {"true": True, "on": True, "false": False, "off": False}
    return name, switches.get(value.lower(), _number(value))


def _reader(name: str, kind: Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.refined(name, text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _strategy(text: str) -> str:
    if text in _STRATEGIES:
        return text
    hint = did_you_mean(text, _STRATEGIES, "{}")
    raise argparse.ArgumentTypeError(f"unknown strategy {text!r}{hint} Allowed values: {', '.join(_STRATEGIES)}")


def _number(text: str) -> int | float | str | None:
    """Parse a number or None; the plan rejects anything else."""
    return None if text == "none" else number_or_text(text)


def _classes(text: str) -> str | tuple[str, ...] | None:
    found = split_commas(text)
    return None if found == ["none"] else text if len(found) < 2 else tuple(found)


def words_for(settings: Mapping[str, str]) -> list[str]:
    """Return the words of `%distributed plan` that set these, each given as `text_of` writes it."""
    words = [settings["strategy"]] if "strategy" in settings else []
    for name, text in settings.items():
        if name != "strategy":
            words += _words_for(name, text.strip())
    return words


def _words_for(name: str, text: str) -> list[str]:
    kind = SETTINGS[name].kind if name in SETTINGS else None
    flag = f"--{name.replace('_', '-')}"
    if text == "off" and isinstance(kind, Switch | Way):
        return [flag.replace("--", "--no-", 1)]
    if text == "on" and isinstance(kind, Switch | Way):
        return [flag]
    if isinstance(kind, Options):
        return [flag, *(text.split() or ["none"])]
    return [f"{flag}={text}"]


def allowed_words(kind: Kind) -> tuple[str, ...]:
    """Return the texts that a setting of this kind may have; empty: they are not a few."""
    if isinstance(kind, Switch):
        return ("on", "off")
    if isinstance(kind, OptionalSwitch):
        return tuple(_TRISTATE)
    if isinstance(kind, Way):
        return ("off", "on", *(word for word in kind.words if word != "default"))
    return kind.words if isinstance(kind, Choice) else ()


def text_of(kind: Kind, value: object) -> str:
    """Return a setting's value as it is typed."""
    if isinstance(kind, OptionalSwitch):
        return next(word for word, meaning in _TRISTATE.items() if meaning is value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={entry}" for key, entry in value.items()) or "none"
    if isinstance(value, tuple):
        return ",".join(value)
    return "none" if value is None else str(value)


def named_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given, with their values."""
    typed = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
    if typed["strategy"] in (None, "auto"):
        del typed["strategy"]
    return typed


def flags(before: Plan, after: Plan) -> str:
    """Return the flags that change one plan to the other."""
    words: list[str] = [] if before.strategy == after.strategy else [after.strategy]
    for name, setting in SETTINGS.items():
        value = getattr(after, name)
        if name == "strategy" or value == getattr(before, name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool) and isinstance(setting.kind, Switch | Way):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {text_of(setting.kind, value)}")
    return " ".join(words)
