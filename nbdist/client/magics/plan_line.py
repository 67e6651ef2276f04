"""How `%distributed plan` is typed: the flag of each setting, both ways. Knows no session."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from nbdist.client.magics.magic_line import MagicParser, names
from nbdist.errors import UsageError
from nbdist.plan import Plan, setting_names
from nbdist.planning import rules

_TRISTATE = {"on": True, "off": False, "default": None}
_STRATEGIES = (*rules.CHOICES["strategy"], "auto")


def plan_parser() -> MagicParser:
    """Reads `%distributed plan`. Only the settings that were typed are in what it gives."""
    parser = _PlanParser("%distributed plan", "Show the plan, or change what is named in it.")
    parser.formatter_class = _Help
    parser.usage = "%(prog)s [none | ddp | fsdp | hsdp | auto] [SETTING ...]"
    parser.add_argument(
        "strategy",
        nargs="?",
        type=_strategy,
        choices=_STRATEGIES,
        help="how models are spread; auto: propose the first that fits the memory",
    )
    parser.add_argument("--reset", action="store_true", help="begin from the default plan")
    parser.add_argument("--model", metavar="NAME", help="auto: the model, a variable of rank 0")
    parser.add_argument("--batch", metavar="NAME", help="auto: a micro-batch, a variable of rank 0")
    for title, settings in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, (metavar, text) in settings.items():
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text, **_how_to_read(name, metavar))
    return parser


class _PlanParser(MagicParser):
    """A strategy behind a setting whose value may be left out is the strategy: `--compile fsdp`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, which would take the strategy for the setting's value."""
        words = list(args)
        for number, word in enumerate(words[:-1]):
            if isinstance(self._option_string_actions.get(word), _Way) and words[number + 1] in _STRATEGIES:
                words[number] = f"{word}=on"
        return super().parse_known_args(words, namespace)

    def suggest(self, typed: str) -> list[str]:
        """The ways of a setting first, where one may follow."""
        words = typed.split() if typed[-1:].isspace() else typed.split()[:-1]
        is_open = bool(words) and isinstance(self._option_string_actions.get(words[-1]), _Way)
        ways = rules.WAYS[self._option_string_actions[words[-1]].dest] if is_open else ()
        return [*ways, *super().suggest(typed)]


def _how_to_read(name: str, metavar: str) -> dict[str, Any]:
    if name in rules.SWITCHES:
        return {"action": argparse.BooleanOptionalAction}
    if name in rules.OPTIONAL_SWITCHES:
        return {"action": _Tristate, "choices": tuple(_TRISTATE)}
    if name in rules.WAYS:
        return {"action": _Way, "metavar": metavar}
    if name in rules.CHOICES:
        return {"type": _chooser(name), "choices": rules.CHOICES[name]}
    if name == "comm_hook_options":
        return {"action": _Options, "nargs": "+", "metavar": metavar}
    return {"type": _classes if name == "shard_by" else _number, "metavar": metavar}


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
            parser.error(f"{option_string} takes no value, and {values!r} follows it")
        else:
            setattr(namespace, self.dest, rules.choose_way(self.dest, values))


class _Options(argparse.Action):
    """NAME=VALUE words; "none" for none of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, dict(_option(parser, word) for word in values if values != ["none"]))


def _option(parser: argparse.ArgumentParser, word: str) -> tuple[str, Any]:
    name, separator, value = word.partition("=")
    if not separator:
        parser.error(f"{word!r} is not an option: write NAME=VALUE, for example matrix_approximation_rank=2")
    switches = {"true": True, "on": True, "false": False, "off": False}
    return name, switches.get(value.lower(), _number(value))


def _chooser(name: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        try:
            return rules.choose(name, text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return choose


def _strategy(text: str) -> str:
    if text in _STRATEGIES:
        return text
    close = difflib.get_close_matches(text, _STRATEGIES, 1)
    hint = f": did you mean {close[0]}?" if close else "."
    raise argparse.ArgumentTypeError(f"unknown strategy {text!r}{hint} Allowed are {', '.join(_STRATEGIES)}")


def _number(text: str) -> int | float | str | None:
    """A number or None; anything else is for the plan to refuse."""
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _classes(text: str) -> str | tuple[str, ...] | None:
    found = names(text)
    return None if found == ["none"] else text if len(found) < 2 else tuple(found)


def named_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were typed, with their values."""
    typed = {name: value for name, value in vars(arguments).items() if name in setting_names()}
    if typed["strategy"] in (None, "auto"):
        del typed["strategy"]
    return typed


def flags(before: Plan, after: Plan) -> str:
    """What to type to get from one plan to the other."""
    words: list[str] = [] if before.strategy == after.strategy else [after.strategy]
    for name in setting_names():
        value = getattr(after, name)
        if name == "strategy" or value == getattr(before, name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool) and name in (*rules.SWITCHES, *rules.WAYS):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name in rules.OPTIONAL_SWITCHES:
            words.append(f"--{flag} {_word_of(value)}")
        elif isinstance(value, Mapping):
            words.append(f"--{flag} {' '.join(f'{key}={entry}' for key, entry in value.items()) or 'none'}")
        else:
            words.append(f"--{flag} {','.join(value) if isinstance(value, tuple) else str(value).lower()}")
    return " ".join(words)


def _word_of(value: bool | None) -> str:
    return next(word for word, meaning in _TRISTATE.items() if meaning is value)


_GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "every strategy": {
        "precision": ("", "what is computed in"),
        "fp8_recipe": ("", "how fp8 scales: tensorwise is fastest"),
        "accumulate": ("N", "micro-batches for each optimizer step"),
        "clip_grad_norm": ("NORM", "largest norm of the gradients, or none"),
        "ema": ("DECAY", "average the weights of all steps, such as 0.999, or none"),
        "compile": ("MODE", f"compile models: {', '.join(rules.WAYS['compile'])}"),
        "compile_dynamic": ("", "sizes of inputs are symbols"),
        "compile_fullgraph": ("", "a break of the graph is an error"),
        "activation_checkpointing": ("", "what is computed again in backward"),
        "activation_budget": ("SHARE", "how much of the activations is kept, such as 0.5, or none: all"),
        "activation_offload": ("", "activations wait in CPU memory for backward"),
        "sync_batchnorm": ("", "BatchNorm over all ranks"),
    },
    "ddp": {
        "comm_hook": ("", "how gradients are compressed"),
        "comm_hook_options": ("NAME=VALUE", "as torch names them: matrix_approximation_rank=2"),
        "bucket_mb": ("MIB", "size of the buckets"),
        "find_unused_parameters": ("", "for models that don't use all in each step"),
        "static_graph": ("", "each step has the same graph"),
        "gradient_as_bucket_view": ("", "gradients live in the buckets"),
        "local_sgd_steps": ("N", "average parameters every N steps, not gradients; 0: no"),
    },
    "fsdp and hsdp": {
        "shard_by": ("CLASS", "what a block is: Block or Block,Head, or none: found"),
        "reshard": ("", "free parameters after forward"),
        "prefetch": ("N", "blocks that are gathered ahead"),
        "exchange": ("", "gradients in each micro-batch (less memory), or in the last (less traffic)"),
        "offload": ("", "keep parameters, gradients and optimizer state in CPU memory"),
        "replicas": ("N", "hsdp: groups that hold the whole model, or none: nodes"),
    },
    "data": {
        "dispatch": ("", "rank 0 alone reads the data"),
        "even_batches": ("", "as many batches on all ranks"),
    },
    "each rank": {
        "seed": ("N", "of all random generators, or none"),
        "seed_per_rank": ("", "add the rank to the seed"),
        "deterministic": ("", "deterministic algorithms only"),
        "tf32": ("", "TF32 for float32 products"),
        "numa": ("", "bind to the cores and memory next to the GPU"),
        "gc_interval": ("N", "collect garbage every N steps; 0: as Python does"),
    },
}
