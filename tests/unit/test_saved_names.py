"""The names of a rank as bytes and back: what stays shared, what refers to what is there, what is left out and why."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.saving.name_pickler import PickledNames, Surroundings, make_names, pickle_names
from nbdist.saving.saved_session import LeftOut


def cell(code: str) -> dict[str, Any]:
    """What a cell leaves in a namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    return names


def own(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if not name.startswith("__")}


def around(names: dict[str, Any] | None = None, prepared: dict[Any, Any] | None = None) -> Surroundings:
    return Surroundings({} if names is None else names, prepared or {})


def there_and_back(values: dict[str, Any], before: Surroundings | None = None) -> dict[str, Any]:
    """The names after a save to a file and a load, of which none was left out."""
    pickled = pickle_names(values, before or around())
    assert pickled.left_out == []
    made, left_out = make_names(PickledNames.of(pickled.content()), before or around())
    assert left_out == []
    return made


def test_names_that_share_an_object_share_it_again() -> None:
    shared: list[int] = [1]
    made = there_and_back({"a": shared, "b": {"same": shared}})
    assert made["a"] is made["b"]["same"]


def test_tensors_that_share_memory_share_it_again() -> None:
    whole = torch.arange(6.0)
    made = there_and_back({"whole": whole, "row": whole[2:4]})
    made["row"][0] = 9.0
    assert made["whole"].tolist() == [0.0, 1.0, 9.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("length", [3, 1 << 18])
def test_arrays_come_back_writable_with_their_types(length: int) -> None:
    made = there_and_back({"array": np.arange(length, dtype=np.int32).reshape(1, -1)})["array"]
    made += 1
    assert made.dtype == np.int32 and made.shape == (1, length) and made[0, -1] == length


def test_an_optimizer_of_the_users_own_holds_the_parameters_of_the_model_beside_it() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    made = there_and_back({"net": net, "optimizer": optimizer})
    assert made["optimizer"].param_groups[0]["params"][0] is made["net"].weight
    assert made["optimizer"].state[made["net"].weight]["step"] == 1


def test_a_function_uses_the_names_of_the_namespace_that_it_comes_back_to() -> None:
    names = cell("rate = 1\nread = lambda: rate")
    pickled = pickle_names(own(names), around(names))
    now = {"rate": 7}
    made, _ = make_names(pickled, around(now))
    assert made["read"]() == 7


def test_a_function_does_not_take_what_it_uses_with_it() -> None:
    names = cell("import threading\nlock = threading.Lock()\ndef use(): return lock")
    pickled = pickle_names(own(names), around(names))
    assert [each.name for each in pickled.left_out] == ["lock"]
    made, _ = make_names(pickled, around(now := {"lock": "another"}))
    assert made["use"]() == "another" and now


def test_closures_defaults_and_attributes_of_functions_come_back() -> None:
    step = "    def step(by=2, *, sign=1): return start + by * sign\n    step.kind = 'x'\n    return step\n"
    names = cell(f"def counter(start):\n{step}step = counter(5)")
    made = there_and_back(own(names), around(names))["step"]
    assert (made(), made(1, sign=-1), made.kind) == (7, 4, "x")


def test_a_class_that_cells_define_again_is_the_one_that_they_have_defined() -> None:
    names = cell("class Net: pass\nnet = Net()")
    pickled = pickle_names({"net": names["net"]}, around(names))
    again = cell("class Net: pass")
    made, _ = make_names(pickled, around(again))
    assert type(made["net"]) is again["Net"]


def test_a_class_that_no_cell_defines_again_travels_with_its_object() -> None:
    names = cell("def make():\n    class Local:\n        def read(self): return 3\n    return Local()\nthing = make()")
    assert there_and_back({"thing": names["thing"]}, around(names))["thing"].read() == 3


def test_a_class_that_cells_don_t_define_again_comes_with_its_methods_and_the_names_that_they_use() -> None:
    names = cell("rate = 2\nclass Net:\n    def read(self): return rate\nnet = Net()")
    made, left_out = make_names(pickle_names(own(names), around(names)), around(now := {}))
    now.update(made)
    assert left_out == [] and type(made["net"]) is made["Net"] and made["net"].read() == 2
    now["rate"] = 5
    assert made["net"].read() == 5


def test_what_is_prepared_is_what_is_prepared_again() -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    pickled = pickle_names({"pair": (model, 1)}, around(prepared={("models", 0, ""): model}))
    made, _ = make_names(pickled, around(prepared={("models", 0, ""): other}))
    assert made["pair"] == (other, 1)


def test_what_is_not_prepared_again_is_named_and_the_rest_comes_back() -> None:
    model = torch.nn.Linear(1, 1)
    pickled = pickle_names({"model": model, "step": 5}, around(prepared={("models", 0, ""): model}))
    made, left_out = make_names(pickled, around())
    assert made == {"step": 5}
    assert left_out == [LeftOut("model", "it is, or holds, a model that no setup cell prepares")]


def test_what_can_not_be_pickled_is_left_out_with_the_way_to_it() -> None:
    shared = [1]
    values = {"ok": shared, "numbers": (n for n in shared), "deep": {"a": [shared, threading.Lock()]}, "last": shared}
    pickled = pickle_names(values, around())
    why = {each.name: each.why for each in pickled.left_out}
    assert why == {"numbers": "it is a generator", "deep": "deep['a'][1] is a _thread.lock"}
    made, _ = make_names(pickled, around())
    assert made == {"ok": [1], "last": [1]} and made["ok"] is made["last"]


class Vanishes:
    """What can be pickled and not be made again."""

    def __init__(self, part: list[int]) -> None:
        self.part = part

    def __reduce__(self) -> Any:
        return _refuse, (self.part,)


def _refuse(part: list[int]) -> Any:
    raise ValueError(f"no {part}")


def test_a_name_that_can_not_be_made_again_takes_only_those_along_that_share_a_part_of_it() -> None:
    part, other = [1], [2]
    values = {"before": other, "bad": Vanishes(part), "sharing": part, "after": (other, [3]), "end": "x"}
    made, left_out = make_names(pickle_names(values, around()), around())
    assert {each.name: each.why for each in left_out} == {
        "bad": "it can't be made again (ValueError: no [1])",
        "sharing": "it shares a part with 'bad', which can't be made again",
    }
    assert made == {"before": [2], "after": ([2], [3]), "end": "x"} and made["after"][0] is made["before"]


def test_equal_names_have_equal_digests_and_others_have_not() -> None:
    def digests(value: float) -> dict[str, bytes]:
        return pickle_names({"x": torch.full((3,), value), "y": [1, "z"]}, around()).digests()

    assert digests(1.0) == digests(1.0)
    assert digests(1.0)["x"] != digests(2.0)["x"] and digests(1.0)["y"] == digests(2.0)["y"]


def test_modules_come_back_by_name() -> None:
    assert there_and_back({"pickle": pickle})["pickle"] is sys.modules["pickle"]


def test_a_class_that_ranks_have_defined_alike_has_the_same_digest_on_all() -> None:
    text = (
        "class Net:\n    scale = 2\n    def read(self, by=3): return [by * self.scale for _ in range(by)]\nnet = Net()"
    )

    def digests() -> dict[str, bytes]:
        names = cell(text)
        return pickle_names(own(names), around(names)).digests()

    assert digests() == digests()
