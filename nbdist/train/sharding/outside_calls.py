"""Calls of a sharded model from outside its forward: `model.encode(x)`, `model.decoder.logits(x)`.

FSDP gathers parameters when a module is called, and for no other method. Methods that call submodules or use parameters
are found by their source; others are named in the plan. Called within the model's forward, they are as they were.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from nbdist.base.text import did_you_mean
from nbdist.errors import UsageError

_ENTER = "nbdist_enter"
_MOST = 16  # modules whose calls from outside are looked for
_ITS_OWN = ("torch.", "transformers.modeling_utils", "transformers.generation", "nbdist.")
# What is asked of a parameter without using its values.
_ABOUT = ("shape", "size", "dim", "ndim", "dtype", "device", "numel", "requires_grad", "requires_grad_", "grad")


def refuse_unknown_methods(model: nn.Module, named: Sequence[str]) -> None:
    """Refuse names of methods that a model does not have.

    Raises:
        UsageError: With the nearest name.
    """
    for name in named:
        path, _, method = name.rpartition(".")
        module = _submodule(model, path)
        if module is None or not callable(getattr(module, method, None)):
            raise UsageError(f"methods: {type(model).__name__} has no method {name!r}{_meant(model, name)}")


def let_in(model: nn.Module, named: Sequence[str]) -> None:
    """Have calls from outside a sharded model's forward gather what they use.

    Args:
        model: The root, sharded.
        named: Methods besides those that are found: "encode", "decoder.logits".
    """
    for name in named:
        path, _, method = name.rpartition(".")
        _register(model, path, method)
    for path, module in list(model.named_modules()):
        for method in _methods(module):
            if _name(path, method) not in {*named, "generate"} and _uses(module, method):
                _register(model, path, method)
    for path in list(_held_by_root(model)):
        _register(model, path, "forward")


def _held_by_root(model: nn.Module) -> Iterator[str]:
    """Yield paths of modules, the model first, that compute with parameters which no block gathers.

    Those deep inside are left out: they are hardly called from outside, and each costs some microseconds in each step.
    """
    waiting, found = deque([("", model)]), 0
    while waiting and found < _MOST:
        path, module = waiting.popleft()
        if type(module).forward is not nn.Module.forward and any(True for _ in module.parameters()):
            found += 1
            yield path
        below = ((_name(path, name), child) for name, child in module.named_children())
        waiting += [(name, child) for name, child in below if not isinstance(child, FSDPModule)]


def _name(path: str, method: str) -> str:
    return f"{path}.{method}" if path else method


def _meant(model: nn.Module, name: str) -> str:
    known = [_name(path, method) for path, module in model.named_modules() for method in _methods(module)]
    return did_you_mean(name, known) or ": name it as you call it, for example 'encode' or 'decoder.logits'"


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    with suppress(AttributeError):
        return model.get_submodule(path)
    return None


# --- which methods use parameters


def _methods(module: nn.Module) -> Mapping[str, types.FunctionType]:
    """Return the public methods that the author of a module's class wrote, without forward."""
    return _methods_of(cast(Hashable, type(module)))


@functools.cache
def _methods_of(kind: Any) -> Mapping[str, types.FunctionType]:
    found: dict[str, types.FunctionType] = {}
    for base in kind.__mro__:
        if not base.__module__.startswith(_ITS_OWN) and base.__module__ != "builtins":
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType) and not name.startswith("_") and name != "forward":
                    found.setdefault(name, value)
    return found


def _uses(module: nn.Module, method: str) -> bool:
    """Return whether a method uses parameters of this module, or of one below it, as far as its source shows."""
    methods, waiting, seen = _methods(module), [method], {method}
    while waiting:
        for use in _uses_of(methods[waiting.pop()]):
            if _is_used(module, use):
                return True
            if len(use.names) == 1 and use.names[0] in methods and use.names[0] not in seen:
                seen.add(use.names[0])
                waiting.append(use.names[0])
    return False


class _Use(NamedTuple):
    """What a method does with something of itself.

    Attributes:
        names: The way there: `self.decoder.head(x)` is ("decoder", "head").
        called: Whether it is called, or looped over, and not only passed on or computed with.
    """

    names: tuple[str, ...]
    called: bool


def _is_used(module: nn.Module, use: _Use) -> bool:
    found: nn.Module = module
    for at, name in enumerate(use.names):
        if name in found._parameters:
            return found._parameters[name] is not None and not set(use.names[at:]) & set(_ABOUT)
        below = found._modules.get(name)
        if below is None:
            return found is not module and name in _methods(found) and _uses(found, name)
        found = below
    return use.called and any(True for _ in found.parameters())


@functools.cache
def _uses_of(function: types.FunctionType) -> frozenset[_Use]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source: it can be named
        return frozenset()
    own = function.__code__.co_varnames[: function.__code__.co_argcount][:1]
    return frozenset(_find_uses(tree, own[0])) if own else frozenset()


def _find_uses(tree: ast.AST, own: str) -> Iterator[_Use]:
    for node in ast.walk(tree):
        called: list[ast.expr] = []
        passed: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called.append(node.func)
            passed += [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.For | ast.comprehension):
            called += _looped(node.iter)
        elif isinstance(node, ast.Assign):
            called.append(node.value)
        elif isinstance(node, ast.BinOp):
            passed += [node.left, node.right]
        yield from (_Use(names, True) for part in called if (names := _names(part, own)))
        yield from (_Use(names, False) for part in passed if (names := _names(part, own)))


def _looped(iterated: ast.expr) -> list[ast.expr]:
    """Return what is looped over, also by way of `enumerate` and such."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        return [*iterated.args]
    return [iterated]


def _names(node: ast.AST, own: str) -> tuple[str, ...]:
    """Return ("decoder", "head") for `self.decoder.head`, and for an item of it; nothing for what is not the own."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.value
    return tuple(names) if isinstance(node, ast.Name) and node.id == own else ()


# --- calls of them


def _register(model: nn.Module, path: str, method: str) -> None:
    """Have a method run as FSDP's forward of the model, and of what is sharded between the model and its module."""
    module = model.get_submodule(path)
    gathered = [each for each in _on_the_way(model, path) if isinstance(each, FSDPModule)]
    for each in gathered:
        if _ENTER not in vars(each):
            setattr(each, _ENTER, types.MethodType(_enter, each))
            register_fsdp_forward_method(each, _ENTER)
    original = getattr(module, method)
    function = original.__func__ if isinstance(original, types.MethodType) else lambda self, *a, **k: original(*a, **k)

    @functools.wraps(function)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound: Callable[..., Any] = functools.partial(function, self)
        if torch.compiler.is_compiling():  # what is compiled runs within the model's forward
            return bound(*args, **kwargs)
        if method == "forward" and isinstance(self, FSDPModule) and _is_called_by_torch():
            return bound(*args, **kwargs)
        lacking: list[nn.Module] = [each for each in gathered if not _is_within(each)]
        return functools.reduce(_entered, reversed(lacking), bound)(*args, **kwargs)

    setattr(module, method, types.MethodType(call, module))


def _is_called_by_torch() -> bool:
    """Return whether the caller's caller is `Module.__call__`, which has run FSDP's own hooks, and not the user."""
    return bool(sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__)


def _on_the_way(model: nn.Module, path: str) -> Iterator[nn.Module]:
    yield model
    names = path.split(".") if path else []
    for end in range(1, len(names) + 1):
        yield model.get_submodule(".".join(names[:end]))


def _enter(self: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _entered(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return functools.partial(getattr(module, _ENTER), function)


def _is_within(module: nn.Module) -> bool:
    """Return whether the module's forward is running, or another method of it that gathers.

    By the stack: an interrupt may end them anywhere, and leaves nothing there.
    """
    codes = {inspect.unwrap(type(module).forward).__code__, _enter.__code__}
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code in codes and code.co_varnames and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False
