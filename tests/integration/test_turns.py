"""Ranks that take turns, share inputs, run out of data or memory. Names and meanings are Accelerate's."""

from __future__ import annotations

import pytest

from testbed.kernel import Kernel
from tests.support.cells import TRAINING, on_ranks, refused, value


@pytest.fixture(autouse=True)
def _names(ranks: Kernel) -> None:
    on_ranks(ranks, TRAINING)


def test_inputs_are_split_between_ranks(ranks: Kernel) -> None:
    code = """
def share(inputs, **more):
    with nbdist.split_between_processes(inputs, **more) as mine: return nbdist.gather_object([mine])
print(share([1, 2, 3]), share([1, 2, 3], apply_padding=True), share("abc"), share({"a": (1, 2), "b": [3, 4]}))
tensors = [part.tolist() for part in share(torch.arange(3), apply_padding=True)]
print(share([1]), share([1], apply_padding=True), share([]), tensors)
"""
    shown = ranks.ok(f"%%distributed\n{code}").lines[0]
    assert shown[0] == "[[1, 2], [3]] [[1, 2], [3, 3]] ['ab', 'c'] [{'a': (1,), 'b': [3]}, {'a': (2,), 'b': [4]}]"
    assert shown[1] == "[[1], []] [[1], [1]] [[], []] [[0, 1], [2, 2]]"


def test_arrays_and_datasets_are_split_as_what_they_are(ranks: Kernel) -> None:
    code = """
import datasets, numpy
def share(inputs):
    with nbdist.split_between_processes(inputs, apply_padding=True) as mine: return nbdist.gather_object([mine])
arrays, tables = share(numpy.arange(3)), share(datasets.Dataset.from_dict({"a": [0, 1, 2]}))
[part.tolist() for part in arrays], [list(part["a"]) for part in tables], type(tables[0]).__name__"""
    assert value(ranks, code) == "([[0, 1], [2, 2]], [[0, 1], [2, 2]], 'Dataset')"


def test_the_main_process_goes_first_even_if_it_fails(ranks: Kernel) -> None:
    code = """
store = dist.distributed_c10d._get_default_store()
with nbdist.main_process_first():
    place = store.add(f"turn {turn}", 1)
try:
    with nbdist.local_main_process_first():
        if rank == 0: raise ValueError
except ValueError: pass
main = [nbdist.is_main_process(), nbdist.is_local_main_process(), not nbdist.is_last_process()]
[place == rank + 1, *(answer == (rank == 0) for answer in main)]"""
    assert value(ranks, "turn = 1\n" + code) == "[True, True, True, True]"


def test_print_and_on_main_process_are_for_rank_0(ranks: Kernel) -> None:
    code = """
@nbdist.on_main_process
def greet(name): print("hello", name); return name
answer = greet("you"); nbdist.print("once", answer, sep="-"); nbdist.wait_for_everyone()"""
    assert ranks.ok(f"%%distributed\n{code}").lines == {0: ["hello you", "once-you"]}


def test_a_trigger_of_one_rank_is_seen_by_all_once(ranks: Kernel) -> None:
    code = "if rank == 1: nbdist.set_trigger()\nnbdist.check_trigger(), nbdist.check_trigger()"
    assert value(ranks, code) == "(True, False)"


def test_ranks_with_different_numbers_of_batches_join(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(find_unused_parameters=False)
loader = nbdist.prepare(DataLoader(torch.ones(5, 4), 1), plan=state.current().plan)
count = 0
with nbdist.join_uneven_inputs([model], even_batches=False):
    for part in loader:
        optimizer.zero_grad(); nbdist.backward(model(part).square().mean()); optimizer.step(); count += 1
nbdist.gather_object([count]), loader.even_batches, bool(nbdist.check(model))"""
    assert value(ranks, code) == "([3, 2], True, True)"


def test_sharded_models_can_not_join(ranks: Kernel) -> None:
    code = "model, _ = prepared('fsdp')\nwith nbdist.join_uneven_inputs([model]): pass"
    assert "works for DDP, and FSDPNet is sharded" in refused(ranks, code)


def test_the_batch_size_is_made_smaller_on_all_ranks_until_it_fits_on_each(ranks: Kernel) -> None:
    code = """
tried = []
@nbdist.find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda size: size // 2)
def train(batch_size, name):
    tried.append(batch_size)
    if batch_size > (4 if rank == 0 else 2): raise torch.OutOfMemoryError("CUDA out of memory.")
    return name
train("done"), tried"""
    assert value(ranks, code) == "('done', [8, 4, 2])"
    never = "@nbdist.find_executable_batch_size\ndef train(batch_size): raise MemoryError\ntrain()"
    assert "not even a batch of 1" in refused(ranks, never)


def test_ranks_that_were_short_of_memory_in_different_micro_batches_begin_a_window_together(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared(accumulate=3)
@nbdist.find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda size: size // 2)
def train(batch_size):
    told = []
    for number in range(3):
        with nbdist.accumulate(model):
            if batch_size == 2 and number == 1 - rank: raise torch.OutOfMemoryError("CUDA out of memory.")
            nbdist.backward(model(batch()).square().mean()); optimizer.step(); optimizer.zero_grad()
        told.append(nbdist.sync_gradients())
    return told
train()"""
    assert value(ranks, code) == "[False, False, True]"


def test_a_batch_size_that_the_caller_gives_or_that_does_not_shrink_is_refused(ranks: Kernel) -> None:
    begun = "@nbdist.find_executable_batch_size(reduce_batch_size_fn=lambda size: size)\ndef train(batch_size):"
    assert "the batch size, is given by find_executable" in refused(ranks, f"{begun} pass\ntrain(64)")
    assert "gave 128 for 128, which did not fit" in refused(ranks, f"{begun} raise MemoryError\ntrain()")


def test_free_memory_lets_go_of_what_was_prepared(ranks: Kernel) -> None:
    code = """
model, optimizer = prepared()
model, optimizer = nbdist.free_memory(model, optimizer)
model, optimizer, len(state.current().models)"""
    assert value(ranks, code) == "(None, None, 0)"
