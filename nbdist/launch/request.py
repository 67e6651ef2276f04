"""A launch request, checked when it is made. Starts nothing; refers to torch only by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.base.checks import check_choice, check_seconds, check_whole, is_whole
from nbdist.client.start.start_settings import check_value
from nbdist.devices import visible_gpus
from nbdist.errors import UsageError
from nbdist.wire.processes.nodes import NodesWanted

PRECISIONS = ("no", "fp16", "bf16", "fp8")
START_METHODS = ("warm", "fork", "spawn")
RENDEZVOUS = ("static", "c10d")
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Request:
    """A launch request. Attributes are `notebook_launcher`'s arguments, with the same meaning.

    nodes: Those that nbdist starts for it; None: this machine, or those where it is called too.

    Raises:
        UsageError: One of them is invalid; the text names it, the allowed values, and what to type.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    num_processes: int | None = None
    mixed_precision: str = "no"
    use_port: str | int = str(DEFAULT_PORT)
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_line_prefix_template: str | None = None
    start_method: str | None = None
    gpus: Sequence[int | str] | None = None
    timeout: float | None = None
    all_results: bool = True
    cpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: NodesWanted | None = None

    def __post_init__(self) -> None:
        _check_function(self.function)
        if not isinstance(self.args, (tuple, list)):
            raise UsageError(f"args must be a tuple, not {_a_type(self.args)}: `args=(value,)` for one argument")
        _check_call(self.function, self.args)
        check_value("num_nodes", self.num_nodes)
        check_whole("node_rank", self.node_rank, 0)
        if self.node_rank >= self.num_nodes:
            raise UsageError(
                f"node_rank={self.node_rank} is too large for num_nodes={self.num_nodes}: "
                f"nodes are counted from 0 to {self.num_nodes - 1}"
            )
        _check_gpus(self.gpus)
        object.__setattr__(self, "num_processes", _count(self.num_processes, self.gpus, self.cpu))
        object.__setattr__(self, "mixed_precision", _precision(self.mixed_precision))
        object.__setattr__(self, "use_port", _port(self.use_port))
        check_value("master_addr", self.master_addr)
        check_choice("rdzv_backend", self.rdzv_backend, RENDEZVOUS)
        _check_text("rdzv_endpoint", self.rdzv_endpoint, empty=True)
        if not isinstance(self.rdzv_conf, (Mapping, type(None))):
            raise UsageError(f"rdzv_conf must be a dict or None, not {_a_type(self.rdzv_conf)}")
        _check_text("rdzv_id", self.rdzv_id)
        check_whole("max_restarts", self.max_restarts, 0)
        check_seconds("monitor_interval", self.monitor_interval, optional=False)
        if self.log_line_prefix_template is not None:
            _check_text("log_line_prefix_template", self.log_line_prefix_template)
        if self.start_method is not None:
            check_choice("start_method", self.start_method, START_METHODS)
        if self.timeout is not None:
            check_value("timeout", self.timeout)
        if not isinstance(self.all_results, bool):
            raise UsageError(f"all_results must be True or False, not {self.all_results!r}")
        if self.start_method == "fork" and not self.alone:
            raise UsageError(
                "start_method='fork' works on one node only: leave start_method out for num_nodes, "
                "rdzv_backend='c10d' and rdzv_endpoint"
            )

        if self.nodes is not None and (self.elastic or self.start_method == "fork"):
            raise UsageError(
                "`on` starts the other nodes itself and never restarts ranks: leave out num_nodes, rdzv_backend, "
                "rdzv_endpoint, max_restarts and start_method='fork'"
            )

    @property
    def count(self) -> int:
        """The number of ranks on this node."""
        assert self.num_processes is not None
        return self.num_processes

    @property
    def port(self) -> int:
        """The requested rendezvous port."""
        return int(self.use_port)

    @property
    def name(self) -> str:
        """The function's name in messages."""
        return _name_of(self.function)

    @property
    def alone(self) -> bool:
        """Whether no other nodes take part."""
        return self.num_nodes == 1 and self.rdzv_backend == "static" and not self.rdzv_endpoint

    @property
    def elastic(self) -> bool:
        """Whether torch's elastic rendezvous is needed: for several nodes, or for restarts."""
        return not self.alone or self.max_restarts > 0

    @property
    def may_use_gpus(self) -> bool:
        """Whether the ranks can see the GPUs, if there are any."""
        return not self.cpu and (self.gpus is None or len(self.gpus) > 0)

    @property
    def in_notebook(self) -> bool:
        """Whether the function runs in the notebook's own process, as in Accelerate with one process.

        GPUs and a timeout can't be set for the notebook itself.
        """
        plain = self.start_method is None and self.gpus is None and self.timeout is None and self.nodes is None
        return self.count == 1 and plain and not self.elastic


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _check_function(function: Any) -> None:
    if not callable(function):
        raise UsageError(
            f"the function to launch must be callable, not {_a_type(function)}: "
            "`notebook_launcher(train, args=(...), num_processes=2)`, without parentheses after the name"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            f"{_name_of(function)} is a generator function: calling it would run none of its lines. "
            "Launch a function that iterates over it instead"
        )
    if inspect.iscoroutinefunction(function):
        name = _name_of(function)
        raise UsageError(f"{name} is async: launch a function that calls `asyncio.run({name}())`")


def _check_call(function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may add its own arguments
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise UsageError(
            f"{_name_of(function)}{signature} can't be called with args ({len(args)} in all): {error}. "
            "`args=(a, b)` passes a and b"
        ) from None


def _count(count: int | None, gpus: Sequence[int | str] | None, cpu: bool) -> int:
    if count is None:
        found = 0 if cpu else len(gpus) if gpus is not None else len(visible_gpus())
        if not found:
            raise UsageError(
                "this machine has no GPU, so give the number of ranks: `notebook_launcher(train, num_processes=2)`"
            )
        return found
    check_value("num_processes", count)
    return count


def _check_gpus(gpus: object) -> None:
    if gpus is None:
        return
    if not isinstance(gpus, (list, tuple, range)):
        raise UsageError(f"gpus must be a list of GPUs, not {_a_type(gpus)}: `gpus=[0, 1]`; `gpus=[]` for none")
    wrong = [gpu for gpu in gpus if not isinstance(gpu, str) and not is_whole(gpu)]
    if wrong:
        raise UsageError(f"gpus must be a list of GPUs, by number or by name, but contains {wrong[0]!r}: `gpus=[0, 1]`")


def _precision(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"mixed_precision must be one of {_listed(PRECISIONS)}, not {value!r}")
    precision = str(value).lower().rpartition(".")[2]  # Accelerate's `PrecisionType.BF16` is also a str
    precision = str(getattr(value, "value", precision)).lower()
    check_choice("mixed_precision", precision, PRECISIONS)
    return precision


def _port(value: object) -> str:
    text = str(value)
    if not (isinstance(value, str) or is_whole(value)) or not text.isdecimal() or int(text) > 65535:
        raise UsageError(
            f"use_port must be a port from 1 to 65535 (0 for any free port), not {value!r}: `use_port='29501'`"
        )
    return text


def _check_text(name: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise UsageError(f"{name} must be a{'' if empty else ' non-empty'} str, not {value!r}")


def _listed(values: Sequence[str]) -> str:
    return ", ".join(map(repr, values))


def _a_type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
