"""What notebook_launcher accepts, and what it says of everything else. Nothing is started here."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from nbdist.errors import UsageError
from nbdist.launch.request import Request


def train(*args: object) -> None: ...


def two(a: object, b: object) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


def configured(function: Any) -> Any:
    """A decorator that gives an argument of its own, as Hydra's does."""

    @functools.wraps(function)
    def call(*args: object) -> Any:
        return function("configuration", *args)

    return call


@configured
def decorated(configuration: object) -> None: ...


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


def request(function: Any = train, **options: Any) -> Request:
    return Request(function, **{"num_processes": 2, **options})


def refusal(function: Any = train, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        request(function, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (None, "must be callable, not a NoneType"),
        ("train", "must be callable, not a str"),
        (generator, "generator is a generator function: calling it would run none of its lines"),
        (asynchronous_generator, "is a generator function"),
        (functools.partial(generator), "generator is a generator function"),
        (coroutine, "coroutine is async: launch a function that calls `asyncio.run(coroutine())`"),
    ],
)
def test_what_is_no_plain_function_is_refused(function: Any, says: str) -> None:
    assert says in refusal(function)


@pytest.mark.parametrize("function", [train, functools.partial(two, 1, 2), list, "x".join, print, lambda: 1, decorated])
def test_whatever_can_be_called_with_the_arguments_is_taken(function: Any) -> None:
    args = (["a"],) if function not in (list, print) and isinstance(function, type("".join)) else ()
    assert request(function, args=args).function is function


@pytest.mark.parametrize("args", [(1,), (1, 2, 3)])
def test_arguments_that_the_function_does_not_take_are_refused_before_anything_is_started(args: Any) -> None:
    says = refusal(two, args=args)
    assert says.startswith("two(a") and f"with args ({len(args)} in all)" in says and "`args=(a, b)`" in says


CASES: list[tuple[str, Any, str]] = [
    ("args", 5, "args must be a tuple, not an int: `args=(value,)` for one argument"),
    ("args", "text", "args must be a tuple, not a str"),
    ("args", {"a": 1}, "args must be a tuple, not a dict"),
    ("num_processes", 0, "num_processes must be a whole number of 1 or more, not 0"),
    ("num_processes", -1, "num_processes must be a whole number of 1 or more, not -1"),
    ("num_processes", 2.0, "num_processes must be a whole number of 1 or more, not 2.0"),
    ("num_processes", "2", "num_processes must be a whole number of 1 or more, not '2'"),
    ("num_processes", True, "num_processes must be a whole number of 1 or more, not True"),
    ("mixed_precision", "bogus", "mixed_precision 'bogus' is unknown. Allowed values: 'no', 'fp16', 'bf16', 'fp8'"),
    ("mixed_precision", "pf16", "did you mean 'fp16'?"),
    ("mixed_precision", 16, "mixed_precision must be one of 'no', 'fp16', 'bf16', 'fp8', not 16"),
    ("mixed_precision", None, "mixed_precision must be one of"),
    ("use_port", 65536, "use_port must be a port from 1 to 65535 (0 for any free port), not 65536"),
    ("use_port", -1, "use_port must be a port"),
    ("use_port", "http", "use_port must be a port"),
    ("use_port", "²", "use_port must be a port"),
    ("use_port", None, "use_port must be a port"),
    ("use_port", True, "use_port must be a port"),
    ("master_addr", "", "master_addr must be a non-empty str"),
    ("master_addr", 5, "master_addr must be a non-empty str"),
    ("node_rank", -1, "node_rank must be a whole number of 0 or more, not -1"),
    ("node_rank", 1, "node_rank=1 is too large for num_nodes=1: nodes are counted from 0 to 0"),
    ("node_rank", "0", "node_rank must be a whole number"),
    ("num_nodes", 0, "num_nodes must be a whole number of 1 or more, not 0"),
    ("rdzv_backend", "etcd", "rdzv_backend 'etcd' is unknown. Allowed values: 'static', 'c10d'"),
    ("rdzv_backend", None, "rdzv_backend None is unknown"),
    ("rdzv_endpoint", None, "rdzv_endpoint must be a str, not None"),
    ("rdzv_conf", "timeout=3", "rdzv_conf must be a dict or None, not a str"),
    ("rdzv_id", "", "rdzv_id must be a non-empty str"),
    ("max_restarts", -1, "max_restarts must be a whole number of 0 or more, not -1"),
    ("max_restarts", 1.5, "max_restarts must be a whole number"),
    ("monitor_interval", 0, "monitor_interval must be a number of seconds above 0, not 0"),
    ("monitor_interval", float("nan"), "monitor_interval must be a number of seconds"),
    ("monitor_interval", "1", "monitor_interval must be a number of seconds"),
    ("log_line_prefix_template", 5, "log_line_prefix_template must be a non-empty str"),
    ("start_method", "forkserver", "start_method 'forkserver' is unknown"),
    ("start_method", "spwan", "did you mean 'spawn'?"),
    ("start_method", 1, "start_method 1 is unknown"),
    ("gpus", 1, "gpus must be a list of GPUs, not an int: `gpus=[0, 1]`; `gpus=[]` for none"),
    ("gpus", "0,1", "gpus must be a list of GPUs, not a str: `gpus=[0, 1]`"),
    ("gpus", [0.5], "gpus must be a list of GPUs"),
    ("gpus", [True], "gpus must be a list of GPUs"),
    ("timeout", 0, "timeout must be a number of seconds above 0, not 0"),
    ("timeout", float("inf"), "timeout must be a number of seconds above 0, not inf"),
    ("timeout", "1 min", "timeout must be a number of seconds above 0, not '1 min'"),
    ("all_results", "no", "all_results must be True or False, not 'no'"),
]


@pytest.mark.parametrize(("name", "value", "says"), CASES, ids=[f"{name}={value!r}" for name, value, _ in CASES])
def test_a_wrong_argument_is_one_error_that_names_it_and_what_is_allowed(name: str, value: Any, says: str) -> None:
    assert says in refusal(**{name: value})


def test_the_error_is_a_value_error_too_as_accelerate_s() -> None:
    assert issubclass(UsageError, ValueError)
    assert re.search("node_rank", refusal(node_rank=2, num_nodes=2))


@pytest.mark.parametrize(
    ("function", "name"),
    [(train, "train"), (functools.partial(functools.partial(two, 1), 2), "two"), (decorated, "decorated")],
)
def test_messages_call_the_function_by_the_name_that_it_was_given(function: Any, name: str) -> None:
    assert request(function).name == name


def test_without_a_number_of_processes_there_is_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.launch.request.visible_gpus", lambda: ["0", "1", "2"])
    assert request(num_processes=None).count == 3
    assert request(num_processes=None, gpus=[2]).count == 1


def test_without_gpus_it_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.launch.request.visible_gpus", list)
    says = "give the number of ranks: `notebook_launcher(train, num_processes=2)`"
    assert says in refusal(num_processes=None)
    assert says in refusal(num_processes=None, gpus=[])


@pytest.mark.parametrize("value", ["bf16", "BF16", "bf16 ".strip()])
def test_precisions_are_taken_in_any_case(value: str) -> None:
    assert request(mixed_precision=value).mixed_precision == "bf16"


def test_accelerate_s_own_precision_type_is_taken() -> None:
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    assert request(mixed_precision=dataclasses.PrecisionType.FP16).mixed_precision == "fp16"


@pytest.mark.parametrize("value", ["29501", 29501])
def test_a_port_is_taken_as_a_number_or_as_text(value: object) -> None:
    assert request(use_port=value).port == 29501


@pytest.mark.parametrize("options", [{"num_nodes": 2}, {"rdzv_backend": "c10d"}, {"rdzv_endpoint": "host:29400"}])
def test_what_meets_other_nodes_does_not_fork(options: dict[str, Any]) -> None:
    assert request(**options).elastic
    assert "start_method='fork' works on one node only" in refusal(start_method="fork", **options)


def test_what_starts_again_may_fork() -> None:
    assert request(max_restarts=1).elastic and request(max_restarts=1).alone
    assert request(start_method="fork", max_restarts=1).max_restarts == 1


def test_one_process_runs_in_the_notebook_unless_a_start_method_is_named() -> None:
    assert request(num_processes=1).in_notebook
    assert not request(num_processes=1, start_method="warm").in_notebook
    assert not request(num_processes=1, num_nodes=2).in_notebook
    assert not request(num_processes=2).in_notebook
