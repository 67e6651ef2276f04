"""What a rank says of values that torch or Python can't read as others."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from nbdist.errors import UsageError
from nbdist.wire.questions.held_variables import GetElements, GetEntries, GetFigures, GetGap, GetVariables, Held
from nbdist.worker.control.variable_answers import VariableAnswers


def answers(value: Any) -> VariableAnswers:
    return VariableAnswers(lambda: {"other": 1, "value": value}, set, lambda: True)


def held(value: Any) -> Held:
    """What it says of a value, beside which there is another one."""
    [other, found] = answers(value).variables(GetVariables([])).held
    assert other.digest
    return found


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a beta
        return torch.eye(3).to_sparse_csr()


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize("make", [compressed, ragged, lambda: torch.ones(3).to_mkldnn(), lambda: nested(3000)])
def test_a_value_that_cannot_be_read_does_not_hide_the_others(make: Any) -> None:
    assert held(make()).why == "values of this type are not compared"


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (np.arange(5)[::-1], np.arange(5)[::-1].copy(), np.arange(5)),
        (np.arange(3, dtype=">f4"), np.arange(3, dtype=">f4"), np.ones(3, dtype=">f4")),
        (torch.tensor([2 + 1j]).conj(), torch.tensor([2 - 1j]), torch.tensor([2 + 1j])),
        (10**5000, 10**5000, 10**5000 + 1),
        (
            torch.ones(2).to(torch.float8_e5m2),
            torch.ones(2).to(torch.float8_e5m2),
            torch.zeros(2).to(torch.float8_e5m2),
        ),
    ],
    ids=["reversed", "big-endian", "conjugate", "long int", "float8"],
)
def test_values_in_unusual_forms_are_compared_by_what_they_are_worth(value: Any, same: Any, other: Any) -> None:
    assert held(value).digest == held(same).digest != held(other).digest


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (compressed, "a sparse (CSR) tensor"),
        (lambda: torch.eye(3).to_sparse(), "a sparse (COO) tensor"),
        (lambda: torch.eye(3).to_sparse_bsc((1, 1)), "a sparse (BSC) tensor"),
        (ragged, "a nested tensor"),
        (lambda: torch.ones(3).to_mkldnn(), "a tensor of layout mkldnn"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor"),
        (lambda: torch.ones(3, device="meta"), "a meta tensor, which has no values"),
    ],
)
def test_a_tensor_whose_elements_cannot_be_read_is_refused_in_words(make: Any, what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = answers(make())
    questions: list[Callable[[], Any]] = [
        lambda: value.statistics(GetFigures("value")),
        lambda: value.elements(GetElements("value", 0, 1)),
        lambda: value.gap(GetGap("value", 0, bytes(4))),
    ]
    for ask in questions:
        with pytest.raises(UsageError, match=re.escape(f"value is {what}")):
            ask()


def test_an_array_in_reverse_and_float8_have_figures() -> None:
    for value in (np.arange(5.0)[::-1], torch.arange(5.0).to(torch.float8_e4m3fn)):
        figures = answers(value).statistics(GetFigures("value"))
        assert (figures.low, figures.mean, figures.high, figures.zeros) == (0.0, 2.0, 4.0, 1)


def entries(value: Any) -> dict[str, Held]:
    return {each.name: each for each in answers(value).entries(GetEntries("value")).held}


@dataclasses.dataclass
class Options:
    rate: float
    layers: list[int]


def test_entries_have_the_names_by_which_they_are_found() -> None:
    value = {"options": Options(0.1, [3, 5]), ("a", 1): torch.nn.ParameterDict({"w b": torch.ones(2)}), "none": {}}
    names = list(entries(value))
    assert names == [
        "value['options']",
        "value['options'].rate",
        "value['options'].layers",
        "value['options'].layers[0]",
        "value['options'].layers[1]",
        "value[('a', 1)]",
        "value[('a', 1)]['w b']",
        "value['none']",
    ]
    found = answers(value).variables(GetVariables([*names, "value['options'].layers[-1]"])).held
    assert [each.name for each in found[:-1]] == names
    assert found[-1].digest == found[4].digest != found[3].digest


@pytest.mark.parametrize(
    "path", ["value['b']", "value.a", "value[0]", "value()", "value[f()]", "value['a'][0]", "1", "a b"]
)
def test_what_is_no_path_to_an_entry_is_not_found(path: str) -> None:
    assert answers({"a": torch.ones(2)}).variables(GetVariables([path])).held == []


def test_no_code_of_a_class_is_run_to_look_into_its_objects() -> None:
    def refuse(*_: object) -> Any:
        pytest.fail("code of the class ran")

    body = dict.fromkeys(("__getattribute__", "__getitem__", "__iter__", "__len__", "__eq__", "__hash__"), refuse)
    stored = dataclasses.make_dataclass("Stored", ["a"], namespace=body, eq=False)
    made_up = dataclasses.make_dataclass("MadeUp", ["a"], namespace={"__dict__": property(refuse)})
    listed = type("Listed", (list,), body)
    assert list(entries(stored(1))) == ["value.a"]
    for value in (object.__new__(made_up), listed()):
        assert entries(value) == {}
        assert held(value).why == "values of this type are not compared"


def test_a_container_in_itself_and_one_with_too_many_entries_end() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert list(entries(ring)) == ["value[0]", "value[1]"]
    answer = answers(list(range(20_000))).entries(GetEntries("value"))
    assert (len(answer.held), answer.more) == (10_000, True)


def test_containers_of_tensors_have_their_size_and_a_large_one_is_compared_only_by_name() -> None:
    large = {"w": torch.zeros(17 << 20, dtype=torch.int32)}
    assert (held(large).size, held(large).device) == (68 << 20, "cpu")
    assert held(large).why == "large: `%distributed variables value` compares it"
    [named] = answers(large).variables(GetVariables(["value"])).held
    assert named.digest


def test_a_model_with_a_parameter_that_cannot_be_read_is_not_called_the_same() -> None:
    class Packed(torch.nn.Parameter): ...

    model = torch.nn.Linear(2, 2)
    model.weight = Packed(torch.ones(2, 2))
    assert held(model).why == "values of this type are not compared"


# --- objects


class Lies:
    """An object whose class says nothing true, and fails where it is asked."""

    def __init__(self, value: Any) -> None:
        object.__getattribute__(self, "__dict__")["value"] = value

    def refuse(self, *_: object) -> Any:
        pytest.fail("code of the class ran")

    __getattribute__ = __getattr__ = __setattr__ = __eq__ = __len__ = __iter__ = __reduce_ex__ = refuse
    __hash__ = __repr__ = __getstate__ = refuse
    __class__ = property(refuse)


class Lazy:
    def __init__(self) -> None:
        self.size = 3

    @functools.cached_property
    def squares(self) -> list[int]:
        return [each * each for each in range(self.size)]


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Texts(Dataset[str]):
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def __len__(self) -> int:
        raise RuntimeError("not known")


def loader(size: int = 8, *, batch: int = 2, seed: int = 0, rank: int = 0, offset: float = 0.0) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(float(size)) + offset)
    return DataLoader(data, batch, sampler=DistributedSampler(data, 2, rank, seed=seed))


def ring(end: int) -> Lies:
    found = Lies([end])
    object.__getattribute__(found, "value").append(found)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: (Lies([1, torch.ones(2)]), Lies([1, torch.ones(2)]), Lies([1, torch.zeros(2)])),
        lambda: (Lies({"a", "b", "c"}), Lies({"c", "b", "a"}), Lies({"a", "b"})),
        lambda: (ring(1), ring(1), ring(2)),
        lambda: (Point(1, torch.ones(2)), Point(1, torch.ones(2)), Point(1, torch.zeros(2))),
        lambda: (Color.RED, Color.RED, Color.BLUE),
        lambda: ([Color], [Color], [Lies]),
        lambda: (range(3), range(3), range(4)),
        lambda: (Path("a"), Path("a"), Path("b")),
        lambda: (torch.float32, torch.float32, torch.float16),
        lambda: (np.float64(1), np.float64(1), np.float64(2)),
        lambda: (functools.partial(sorted, key=len), functools.partial(sorted, key=len), functools.partial(sorted)),
        lambda: (collections.deque([1], 2), collections.deque([1], 2), collections.deque([1], 3)),
        lambda: ([lambda x: x + 1], [lambda x: x + 1], [lambda x: x + 2]),
        lambda: (Texts("a", "b"), Texts("a", "b"), Texts("a")),
        lambda: (Subset(Texts("a", "b"), [0]), Subset(Texts("a", "b"), [0]), Subset(Texts("a", "b"), [1])),
        lambda: (loader(), loader(), loader(10)),
        lambda: (loader(), loader(rank=1), loader(batch=4)),
        lambda: (loader(), loader(), loader(seed=1)),
        lambda: (loader(), loader(), loader(offset=1.0)),
        lambda: (loader().sampler, loader(rank=1).sampler, loader(seed=1).sampler),
    ],
)
def test_an_object_is_compared_by_what_it_has_stored(make: Callable[[], tuple[Any, Any, Any]]) -> None:
    value, same, other = make()
    assert held(value).digest
    assert held(value).digest == held(same).digest != held(other).digest


def test_what_an_object_has_worked_out_from_its_attributes_is_no_difference() -> None:
    asked = Lazy()
    assert asked.squares == [0, 1, 4]
    assert held(asked).digest == held(Lazy()).digest != ""


def test_a_loader_that_has_been_iterated_is_still_the_same() -> None:
    used = loader()
    assert len(list(used)) == 2
    assert held(used).digest == held(loader()).digest != ""


def test_a_difference_in_an_object_is_found_at_its_entry() -> None:
    one, other = entries(loader(seed=0)), entries(loader(seed=1))
    assert [name for name in one if one[name].digest != other[name].digest] == [
        "value.sampler.seed",
        "value.batch_sampler.sampler.seed",
    ]


@pytest.mark.parametrize(
    "make",
    [threading.Lock, lambda: iter([1]), lambda: np.ones(3).view(type("Own", (np.ndarray,), {})), lambda: ValueError(1)],
)
def test_what_code_in_c_keeps_is_not_compared_and_neither_is_what_holds_it(make: Any) -> None:
    for value in (make(), Lies(make()), Subset(make(), [0])):
        assert held(value).why == "values of this type are not compared"
