"""Values travel as parcels: what comes back, what is shared, what stays open, and what errors say."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch

from nbdist.errors import TransferError
from nbdist.transfer import INLINE_LIMIT, Parcel, pack, unpack
from tests.unit.test_host import cgroups, limited

BIG = 1 << 21  # bytes; travels in a segment
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def carry(parcel: Parcel) -> Parcel:
    """What the wire does to a parcel."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(parcel), type=Parcel)


def there_and_back(value: Any) -> Any:
    with pack(value) as packed:
        return unpack(carry(packed.parcel))


def bits(tensor: torch.Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).tolist()


def error_of(value: Any, name: str) -> str:
    with pytest.raises(TransferError) as caught:
        pack(value, name=name)
    return str(caught.value)


def descriptors() -> set[str]:
    """What this process has open, apart from the folder that is read to know it."""
    folder = "/proc/self/fd"
    present = [fd for fd in os.listdir(folder) if os.path.lexists(f"{folder}/{fd}")]
    return {f"{fd} {os.readlink(f'{folder}/{fd}')}" for fd in present}


def descriptors_around(act: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """What is open before `act`, and after it, while what it returns is held."""
    before = descriptors()
    held = act()
    gc.collect()
    after = descriptors()
    del held
    return before, after


def travel() -> Any:
    return there_and_back([torch.ones(BIG), np.ones(1 << 25)])


def forget() -> None:
    pack(torch.ones(BIG))


def fail_to_pickle() -> None:
    error_of([torch.ones(BIG), threading.Lock()], "pair")


def mappings() -> str:
    with open("/proc/self/maps") as file:
        return file.read()


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some strided tensors of one storage with random bits."""
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.sampled_from([0, 1, 7, 64, 300]))
    raw = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=16, max_size=16)), dtype=torch.uint8)
    base = raw.repeat(length * dtype.itemsize // 16 + 1)[: length * dtype.itemsize]
    base = base.remainder(2).bool() if dtype is torch.bool else base.view(dtype)
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if 0 in shape or reach > length:
            shape, stride, reach = [0], [1], 0
        tensors.append(base.as_strided(shape, stride, draw(st.integers(0, length - reach))))
    return tensors


@pytest.mark.torch_private
class TestTensors:
    @hypothesis.given(views(), st.sampled_from([0, BIG]))
    @hypothesis.settings(deadline=None, max_examples=150)
    def test_keep_bits_shape_strides_and_dtype(self, tensors: list[torch.Tensor], ballast: int) -> None:
        arrived, _ = there_and_back([tensors, bytes(ballast)])
        for sent, got in zip(tensors, arrived, strict=True):
            assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride())
            assert bits(got) == bits(sent)

    @hypothesis.given(views())
    @hypothesis.settings(deadline=None, max_examples=100)
    def test_of_one_storage_keep_their_distances(self, tensors: list[torch.Tensor]) -> None:
        arrived = there_and_back(tensors)
        pairs = [(a, b) for a, b in zip(tensors, arrived, strict=True) if a.numel()]
        assert len({b.data_ptr() - a.data_ptr() for a, b in pairs}) <= 1

    @pytest.mark.parametrize("size", [100, BIG])
    def test_that_share_memory_see_each_others_writes_on_arrival(self, size: int) -> None:
        base = torch.zeros(size)
        whole, part = there_and_back([base, base[10:20]])
        part.fill_(1)
        assert whole.sum() == 10

    def test_of_several_dtypes_share_one_storage(self) -> None:
        base = torch.arange(64, dtype=torch.float64)
        doubles, raw = there_and_back([base[3:], base.view(torch.uint8)[5:]])
        doubles[0] = -1
        assert bits(doubles)[:8] == raw[19:27].tolist()

    def test_small_view_of_a_huge_storage_travels_alone(self) -> None:
        huge = torch.zeros(BIG)
        with pack(huge[100:200]) as packed:
            assert packed.parcel.size < 2048

    def test_column_of_a_large_matrix_travels_dense(self) -> None:
        matrix = torch.arange(BIG).reshape(-1, 1024)
        with pack(matrix[:, 3]) as packed:
            assert packed.parcel.size < matrix.nbytes // 100
            assert torch.equal(unpack(packed.parcel), matrix[:, 3])

    def test_far_ends_of_a_huge_storage_take_no_memory_between(self) -> None:
        huge = torch.empty(1 << 28)
        huge[:4], huge[-4:] = 1, 2
        with pack([huge[:4], huge[-4:]]) as packed:
            blocks = sum(os.fstat(segment.fd).st_blocks * 512 for segment in packed.parcel.segments)
            first, last = unpack(packed.parcel)
        assert blocks < 1 << 20
        assert (first.tolist(), last.tolist()) == ([1] * 4, [2] * 4)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
    def test_without_dimensions_or_elements_arrive(self, shape: tuple[int, ...]) -> None:
        assert torch.equal(there_and_back(torch.full(shape, 2.5)), torch.full(shape, 2.5))

    def test_expanded_to_many_rows_stay_one_row(self) -> None:
        with pack(torch.arange(4).expand(1_000_000, 4)) as packed:
            assert packed.parcel.size < 1024
            assert unpack(packed.parcel).stride() == (0, 1)

    def test_spread_over_several_segments_arrive_whole(self) -> None:
        sent = torch.arange(20_000_000)
        assert torch.equal(there_and_back([sent, sent[5:]])[1], sent[5:])

    def test_tell_apart_leaf_and_parameter(self) -> None:
        leaf = torch.zeros(2, requires_grad=True)
        frozen = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        leaf_got, frozen_got = there_and_back([leaf, frozen])
        assert (type(leaf_got), leaf_got.requires_grad) == (torch.Tensor, True)
        assert (type(frozen_got), frozen_got.requires_grad) == (torch.nn.Parameter, False)

    def test_with_a_graph_arrive_as_leaves(self) -> None:
        loss = (torch.ones(3, requires_grad=True) * 2).sum()
        assert there_and_back(loss).is_leaf

    def test_keep_attributes_set_on_them(self) -> None:
        tensor = torch.zeros(3)
        tensor.label = "mine"  # type: ignore[attr-defined]
        assert there_and_back(tensor).label == "mine"

    def test_the_same_tensor_twice_is_one_tensor_on_arrival(self) -> None:
        tensor = torch.zeros(3)
        first, second = there_and_back([tensor, tensor])
        assert first is second

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.randn(40, dtype=torch.complex64).conj(),
            lambda: torch.randn(40, dtype=torch.complex64).conj().imag,
            lambda: torch.eye(5).to_sparse(),
            lambda: torch.eye(5).to_sparse_csr(),
            lambda: torch.quantize_per_tensor(torch.ones(5), 0.5, 1, torch.qint8),
        ],
        ids=["conjugate", "negative", "sparse", "compressed", "quantized"],
    )
    @pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
    @pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
    @pytest.mark.filterwarnings("ignore:.*script_method:FutureWarning")
    @pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning")
    def test_of_unusual_kinds_arrive(self, make: Callable[[], Any]) -> None:
        sent = make()
        got = there_and_back(sent)
        kind = sent.layout, sent.is_quantized, sent.is_conj(), sent.is_neg()
        assert (got.layout, got.is_quantized, got.is_conj(), got.is_neg()) == kind
        dense = torch.Tensor.dequantize if sent.is_quantized else torch.Tensor.to_dense
        assert torch.equal(dense(got), dense(sent))

    @pytest.mark.gpu
    @pytest.mark.parametrize("count", [10, 1 << 25])
    def test_of_a_gpu_arrive_on_the_cpu(self, count: int) -> None:
        base = torch.arange(count, device="cuda")
        whole, part, column = there_and_back([base, base[3:7], base.reshape(-1, 2).clone()[:, 1]])
        assert {whole.device.type, part.device.type, column.device.type} == {"cpu"}
        assert torch.equal(whole, base.cpu())
        assert torch.equal(column, base[1::2].cpu())
        part.fill_(-1)
        assert whole[3:7].tolist() == [-1] * 4

    def test_on_the_meta_device_stay_there(self) -> None:
        assert there_and_back(torch.empty(5, 3, device="meta")).device.type == "meta"

    def test_of_a_subclass_share_memory_with_plain_ones(self) -> None:
        class Named(torch.Tensor):
            pass

        base = torch.zeros(8)
        named, plain = there_and_back([base.as_subclass(Named), base])
        plain[0] = 5
        assert type(named).__name__ == "Named"
        assert named.tolist()[0] == 5

    def test_storages_arrive_and_share(self) -> None:
        base = torch.arange(4, dtype=torch.uint8)
        storage, tensor = there_and_back([base.untyped_storage(), base])
        tensor[0] = 9
        assert storage.tolist() == [9, 1, 2, 3]

    def test_tied_weights_of_a_model_stay_tied(self) -> None:
        first, second = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
        second.weight = first.weight
        got = there_and_back(torch.nn.Sequential(first, second))
        assert got[1].weight is got[0].weight
        assert torch.equal(got[0].weight, first.weight)


class TestOtherValues:
    @pytest.mark.parametrize("size", [1, 70_000, BIG])
    @pytest.mark.parametrize("kind", [bytes, bytearray])
    def test_bytes_arrive(self, kind: type, size: int) -> None:
        sent = kind(random.Random(size).randbytes(size))
        got = there_and_back([sent])[0]
        assert type(got) is kind
        assert got == sent

    def test_large_text_arrives(self) -> None:
        assert there_and_back("ü€" * BIG) == "ü€" * BIG

    @pytest.mark.parametrize("count", [5, 20_000, BIG])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_arrays_arrive_and_can_be_written(self, count: int, order: Any) -> None:
        sent = np.asarray(np.arange(count * 3, dtype=np.int32).reshape(count, 3), order=order)
        got = there_and_back(sent)
        assert np.array_equal(got, sent)
        got[0, 0] = 7
        assert got[0, 0] == 7

    def test_read_only_arrays_stay_read_only(self) -> None:
        sent = np.arange(BIG)
        sent.flags.writeable = False
        assert not there_and_back(sent).flags.writeable

    def test_arrays_with_gaps_and_of_objects_arrive(self) -> None:
        gaps, objects = np.arange(100)[::7], np.array([{}, "a", None], dtype=object)
        got_gaps, got_objects = there_and_back([gaps, objects])
        assert np.array_equal(got_gaps, gaps)
        assert got_objects.tolist() == objects.tolist()

    def test_data_frames_arrive(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": np.arange(BIG), "b": np.ones(BIG), "c": ["x"] * BIG})
        pandas.testing.assert_frame_equal(there_and_back(frame), frame)

    def test_closures_travel_by_value(self) -> None:
        weight = torch.arange(4)
        assert there_and_back(lambda x: (weight * x).tolist())(2) == [0, 2, 4, 6]

    def test_functions_that_travel_by_value_keep_the_files_they_were_written_in(self) -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile("def make():\n    return lambda: 1", "In[3]", "exec"), names)
        made = there_and_back(names["make"])
        assert {each.__code__.co_filename for each in (made, made())} == {"In[3]"}

    def test_payloads_below_one_mebibyte_lie_in_the_parcel(self) -> None:
        with pack(bytes(INLINE_LIMIT - 1024)) as packed:
            assert packed.parcel.segments == []

    def test_parcels_of_large_values_are_small(self) -> None:
        with pack([bytes(BIG), np.zeros(BIG), torch.zeros(BIG), list(range(BIG))]) as packed:
            assert len(msgspec.msgpack.encode(packed.parcel)) < 1024

    def test_importing_transfer_imports_neither_torch_nor_numpy(self) -> None:
        code = "import sys, nbdist.transfer; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestSegments:
    def test_receivers_do_not_see_each_others_writes(self) -> None:
        with pack(torch.zeros(BIG)) as packed:
            first, second = unpack(packed.parcel), unpack(packed.parcel)
            first.fill_(1)
            third = unpack(packed.parcel)
        assert (first.sum(), second.sum(), third.sum()) == (BIG, 0, 0)

    def test_values_keep_their_bytes_when_the_sender_changes_his(self) -> None:
        sent = torch.zeros(BIG)
        with pack(sent) as packed:
            sent.fill_(1)
            assert unpack(packed.parcel).sum() == 0

    def test_values_outlive_the_senders_hold(self) -> None:
        got = there_and_back(torch.ones(BIG))
        gc.collect()
        assert got.sum() == BIG

    def test_no_descriptor_stays_open(self) -> None:
        # In a process of its own: threads that other tests have left open and close files meanwhile.
        acts = [travel, forget, fail_to_pickle]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            for act, (before, after) in zip(acts, process.map(descriptors_around, acts), strict=True):
                assert after == before, act.__name__

    def test_memory_is_unmapped_with_the_last_value_in_it(self) -> None:
        got = there_and_back([torch.ones(BIG), np.ones(BIG)])
        assert "memfd:nbdist" in mappings()
        del got[0]
        assert "memfd:nbdist" in mappings()
        del got
        gc.collect()
        assert "memfd:nbdist" not in mappings()

    def test_small_values_do_not_keep_the_segment(self) -> None:
        small = there_and_back([torch.ones(BIG), torch.ones(4)])[1]
        gc.collect()
        assert "memfd:nbdist" not in mappings()
        assert small.sum() == 4

    def test_nobody_can_write_into_a_segment(self) -> None:
        with pack(bytes(BIG)) as packed, pytest.raises(PermissionError):
            os.pwrite(packed.parcel.segments[0].fd, b"x", 0)

    def test_closing_twice_is_fine(self) -> None:
        packed = pack(bytes(BIG))
        packed.close()
        packed.close()

    def test_a_closed_parcel_says_to_send_it_again(self) -> None:
        with pack(bytes(BIG), name="x") as packed:
            parcel = packed.parcel
        with pytest.raises(TransferError, match=r"cannot receive 'x': .* does not hold it .*send it again"):
            unpack(parcel)

    def test_a_descriptor_that_is_another_file_now_is_refused(self) -> None:
        with pack(bytes(BIG)) as first, pack(bytes(BIG)) as second:
            [segment] = first.parcel.segments
            other = msgspec.structs.replace(segment, fd=second.parcel.segments[0].fd)
            with pytest.raises(TransferError, match="is another file now; send it again"):
                unpack(msgspec.structs.replace(first.parcel, segments=[other]))

    def test_a_descriptor_that_is_a_named_pipe_now_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        try:
            with pack(bytes(BIG)) as packed:
                [segment] = packed.parcel.segments
                pipe = msgspec.structs.replace(segment, fd=reader)
                with pytest.raises(TransferError, match="is another file now"):
                    unpack(msgspec.structs.replace(packed.parcel, segments=[pipe]))
        finally:
            os.close(reader)


SENDER = """
import sys, msgspec, torch
from nbdist.transfer import pack
packed = pack({"x": torch.arange(1 << 20), "f": lambda x: x.sum()}, name="pair")
data = msgspec.msgpack.encode(packed.parcel)
sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
sys.stdout.flush()
sys.stdin.read()
"""
RECEIVER = """
import sys, msgspec
from nbdist.transfer import Parcel, unpack
value = unpack(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Parcel))
assert {imports} == ("torch" in sys.modules)
value["x"][0] = 100
print(sum(value["x"]) if isinstance(value["x"], bytearray) else int(value["x"].sum()))
"""


class TestTwoProcesses:
    @pytest.fixture
    def sender(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            yield process
            process.kill()

    @staticmethod
    def parcel_of(process: subprocess.Popen[bytes]) -> Parcel:
        assert process.stdout is not None
        data = process.stdout.read(int.from_bytes(process.stdout.read(8), "big"))
        return msgspec.msgpack.decode(data, type=Parcel)

    @staticmethod
    def receive(parcel: Parcel, *, imports_torch: bool) -> int:
        code = RECEIVER.format(imports=imports_torch)
        data = msgspec.msgpack.encode(parcel)
        return int(subprocess.run([sys.executable, "-c", code], input=data, stdout=-1, check=True).stdout)

    def test_a_value_of_another_process_arrives(self, sender: subprocess.Popen[bytes]) -> None:
        value = unpack(self.parcel_of(sender))
        assert torch.equal(value["x"], torch.arange(1 << 20))
        assert value["f"](value["x"]) == value["x"].sum()

    def test_a_receiver_writes_into_pages_of_its_own(self) -> None:
        with pack({"x": torch.zeros(BIG)}) as packed:
            assert self.receive(packed.parcel, imports_torch=True) == 100
            assert unpack(packed.parcel)["x"].sum() == 0

    def test_a_receiver_imports_torch_only_for_tensors(self) -> None:
        with pack({"x": bytearray(BIG)}) as packed:
            assert self.receive(packed.parcel, imports_torch=False) == 100

    def test_a_sender_that_has_ended_is_named(self, sender: subprocess.Popen[bytes]) -> None:
        parcel = self.parcel_of(sender)
        sender.kill()
        sender.wait()
        with pytest.raises(TransferError, match=rf"'pair': the process that sent it \({sender.pid}\) has ended"):
            unpack(parcel)


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def work(self) -> None:
        pass


class Refuses:
    def __getstate__(self) -> Any:
        raise ValueError("not this one")


class BreaksOnArrival:
    def __reduce__(self) -> Any:
        return int, ("no number",)


LIVES_HERE = "lives in one process only; send what it is made from, or create it on the ranks"


class TestErrors:
    @pytest.mark.torch_private
    def test_name_the_attribute_of_a_model(self) -> None:
        model = torch.nn.Module()
        model.loader = torch.nn.Linear(2, 2)
        model.loader._lock = threading.Lock()  # type: ignore[assignment]
        text = error_of(model, "model")
        assert text == f"cannot send 'model': model.loader._lock is a _thread.lock, which {LIVES_HERE}"

    def test_name_keys_and_items(self) -> None:
        text = error_of({"a": [1, (2, {("k", 3): (i for i in "ab")})]}, "config")
        assert text.startswith("cannot send 'config': config['a'][1][1][('k', 3)] is a generator, which")

    def test_name_slots(self) -> None:
        class Slotted:
            __slots__ = ("lock",)

        slotted = Slotted()
        slotted.lock = threading.Lock()  # type: ignore[attr-defined]
        assert "slotted.lock is a _thread.lock" in error_of(slotted, "slotted")

    def test_name_closures(self) -> None:
        holder = Holder(lock=threading.Lock())
        assert "step → closure 'holder'.lock is a _thread.lock" in error_of(lambda: holder, "step")

    def test_name_globals_of_a_function(self) -> None:
        scope: dict[str, Any] = {"lock": threading.Lock()}
        exec("def step():\n    return [lock for _ in range(3)]", scope)
        assert "step → global 'lock' is a _thread.lock" in error_of(scope["step"], "step")

    def test_name_defaults(self) -> None:
        def step(a: int, lock: Any = threading.Lock()) -> None:  # noqa: B008
            pass

        assert "step → default of 'lock' is a _thread.lock" in error_of(step, "step")

    def test_name_parts_of_partials_and_methods(self) -> None:
        holder = Holder(lock=threading.Lock())
        assert "job.args[0].lock is" in error_of(functools.partial(print, holder), "job")
        assert "job.__self__.lock is" in error_of(holder.work, "job")

    def test_name_the_value_itself(self) -> None:
        assert error_of(threading.Lock(), "lock").startswith("cannot send 'lock': it is a _thread.lock")

    def test_name_usual_things_that_stay_here(self, tmp_path: Path) -> None:
        with socket.socket() as sock, open(tmp_path / "log", "w") as log:
            queue: Any = multiprocessing.get_context("spawn").Queue()
            for value in (sock, log, queue):
                text = error_of([value], "parts")
                assert "parts[0] is a" in text
                assert LIVES_HERE in text
            queue.close()
            queue.join_thread()

    def test_quote_an_object_that_refuses(self) -> None:
        text = error_of([0, Refuses()], "pair")
        assert "pair[1] is a" in text
        assert "Refuses, which does not pickle (ValueError: not this one)" in text

    def test_quote_what_an_object_says_about_pickling(self) -> None:
        class Dataset:
            def __reduce__(self) -> Any:
                raise TypeError("can't pickle an open dataset: send its path")

        assert "which does not pickle (TypeError: can't pickle an open dataset: send its path)" in error_of(
            Dataset(), "data"
        )

    def test_say_that_there_is_no_memory_in_the_container(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cgroups(monkeypatch, tmp_path, "0::/job", job=limited(1 << 30, (1 << 30) - (1 << 20)))
        assert "no memory for its 2.0 MiB (1.0 MiB are free)" in error_of(torch.zeros(BIG // 4), "value")

    @pytest.mark.torch_private
    def test_say_that_the_memory_of_a_tensor_is_freed(self) -> None:
        weight = torch.ones(5)
        weight.untyped_storage().resize_(0)
        assert "state['w'] is a torch.Tensor, which does not pickle (ValueError: its memory" in error_of(
            {"w": weight}, "state"
        )

    def test_say_that_a_value_is_nested_too_deeply(self) -> None:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        assert "nested too deeply" in error_of(nested, "nested")

    def test_keep_the_cause(self) -> None:
        with pytest.raises(TransferError) as caught:
            pack([Refuses()])
        assert isinstance(caught.value.__cause__, ValueError)

    def test_pass_by_what_a_type_leaves_behind(self) -> None:
        class Leaves(Holder):
            def __getstate__(self) -> Any:
                return {"kept": self.kept}  # type: ignore[attr-defined]

        lock = threading.Lock()
        leaves = Leaves(a=lock, kept={"deep": {"deeper": lock}})
        assert "leaves.kept['deep']['deeper'] is" in error_of(leaves, "leaves")

    def test_on_arrival_say_what_could_not_be_rebuilt(self) -> None:
        with (
            pack(BreaksOnArrival(), name="number") as packed,
            pytest.raises(TransferError, match=r"'number' has arrived, but can't be rebuilt .*ValueError"),
        ):
            unpack(packed.parcel)

    def test_a_search_without_end_gives_the_type_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nbdist.transfer.explain.SEARCH_OBJECTS", 10)
        text = error_of([[Holder(n=n) for n in range(100)], Holder(lock=threading.Lock())], "much")
        assert text.startswith("cannot send 'much': a part of it is a _thread.lock, which")
