"""Which collectives are under way, by torch's own record of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbdist.worker.groups import flight_record
from nbdist.worker.groups.flight_record import Record, parse

ROOT = Path(__file__).resolve().parents[2]


def dump(**backends: tuple[int, int]) -> str:
    """What torch writes, here of NCCL: numbers are text, and -1 stands for none yet."""
    status = {
        name.removeprefix("backend_"): {
            "last_completed_collective": str(ended),
            "last_enqueued_collective": str(started),
            "last_started_collective": "-1",
        }
        for name, (started, ended) in backends.items()
    }
    config = {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}}
    return json.dumps({"nccl_comm_state": {}, "pg_config": config, "pg_status": status, "version": "2.10"})


def test_the_last_started_and_the_last_ended_of_each_backend_are_read() -> None:
    assert parse(dump(backend_0=(7, 5), backend_3=(1, -1))) == {"0": (7, 5), "3": (1, -1)}


@pytest.mark.parametrize("text", ["{}", '{"pg_status": {}, "version": "2.10"}'])
def test_a_dump_without_any_is_read_too(text: str) -> None:
    assert parse(text) == {}


def test_without_a_record_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_record, "DUMPS", ())
    assert Record().unfinished() is None


def recorded(monkeypatch: pytest.MonkeyPatch, *dumps: str) -> Record:
    """A record that reads these dumps of torch's, one after the other."""
    left = iter(dumps)
    monkeypatch.setattr(flight_record, "torch_dumps", lambda: [("nccl", next(left))])
    return Record()


def test_only_backends_with_collectives_under_way_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, dump(backend_0=(7, 5), backend_1=(3, 3)))
    assert found.unfinished() == {"nccl 0": (7, 5)}


def test_what_has_been_given_up_is_not_named_again_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of an aborted group is replaced, and its last collectives never end."""
    stuck = dump(backend_0=(7, 5))
    found = recorded(monkeypatch, stuck, stuck, dump(backend_0=(7, 5), backend_1=(1, 0)), dump(backend_0=(8, 7)))
    found.give_up()
    assert found.unfinished() == {}
    assert found.unfinished() == {"nccl 1": (1, 0)}
    assert found.unfinished() == {"nccl 0": (8, 7)}


def test_nor_when_torch_notes_only_afterwards_that_one_had_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, dump(backend_0=(7, 5)), dump(backend_0=(7, 6)), dump(backend_0=(8, 6)))
    found.give_up()
    assert found.unfinished() == {}
    assert found.unfinished() == {"nccl 0": (8, 6)}


@pytest.mark.torch_private
@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="torch 2.8 records nothing of gloo")
def test_torch_has_what_is_read() -> None:
    """In a process of its own: groups that other tests have left stay in the record."""
    code = """
import torch.distributed as dist
from nbdist.worker.groups.flight_record import Record
from testbed.kernel import wait_until
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
wait_until(lambda: Record().unfinished() == {}, "the end of the barrier in the record")  # another thread notes it
dist.destroy_process_group()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
