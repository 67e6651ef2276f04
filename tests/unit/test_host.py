"""Memory and processors of the machine, of a container with a limit, and of this process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbdist.metrics.node import host

GIB = 1 << 30
TOTAL = psutil.virtual_memory().total


def cgroups(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, **folders: dict[str, object]) -> None:
    """Let this process be in this cgroup, with files in the folders below the root."""
    for folder, files in folders.items():
        place = root / folder.replace("_", "/")
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (place / name).write_text(f"{value}\n")
    (root / "own").write_text(f"{own}\n")
    monkeypatch.setattr(host, "CGROUPS", root)
    monkeypatch.setattr(host, "OWN_CGROUPS", root / "own")


def limited(limit: object, used: int = 0, cached: int = 0) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cached}"}


def test_without_a_limit_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups(monkeypatch, tmp_path, "0::/job", job=limited("max", 7))
    total, used = host.memory()
    assert total == TOTAL
    assert 0 < used < total


def test_in_a_container_its_limit_counts_without_files_that_are_only_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroups(monkeypatch, tmp_path, "0::/job", job=limited(GIB, GIB // 2, GIB // 4))
    assert host.memory() == (GIB, GIB // 4)


def test_of_cgroups_within_each_other_the_smallest_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroups(monkeypatch, tmp_path, "0::/job/step", job=limited(GIB, 300), job_step=limited("max", 100))
    assert host.memory() == (GIB, 300)


def test_a_container_that_does_not_see_the_folder_of_its_cgroup_sees_its_own_as_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroups(monkeypatch, tmp_path, "0::/docker/unseen")
    for name, value in limited(GIB, 9).items():
        (tmp_path / name).write_text(str(value))
    assert host.memory() == (GIB, 9)


def test_the_first_version_of_cgroups_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, object] = {
        "memory.limit_in_bytes": GIB,
        "memory.usage_in_bytes": 500,
        "memory.stat": "total_inactive_file 200",
    }
    cgroups(monkeypatch, tmp_path, "3:cpu:/x\n4:memory:/job\n0::/", memory_job=files)
    assert host.memory() == (GIB, 300)


def test_without_cgroups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "nothing")
    assert host.memory()[0] == TOTAL


def test_memory_of_a_process_grows_by_what_it_writes_to() -> None:
    size = 32 << 20
    before = host.anonymous_memory()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"\1" * size)
        assert host.anonymous_memory() - before >= size


def test_files_that_a_process_reads_are_not_its_memory(tmp_path: Path) -> None:
    size = 32 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    with open(tmp_path / "file", "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as block:
        before = host.anonymous_memory()
        assert sum(block[at] for at in range(0, size, 4096)) == 0
        assert host.anonymous_memory() - before < size // 4


def test_cores_that_work_are_seen() -> None:
    host.busy_cores()
    end = os.times().user + 0.1
    while os.times().user < end:
        pass
    assert 0 < host.busy_cores() <= 1


def test_a_process_that_was_forked_counts_no_processor_time_of_the_one_it_comes_from() -> None:
    program = (
        "import os, time\n"
        "from nbdist.metrics.node.host import ProcessorUse\n"
        "while time.process_time() < 0.2: pass\n"  # a difference to it would be negative
        "use = ProcessorUse()\n"
        "if (pid := os.fork()) == 0:\n"
        "    first = use.look()\n"
        "    while (second := use.look()) is None: pass\n"
        "    print(first, second >= 0, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout == "None True\n"
