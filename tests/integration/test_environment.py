from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nbdist
from testbed.kernel import Kernel, both
from tests.support.cells import pulled
from tests.support.roles import find

HANG = 30.0


@pytest.fixture
def notebook(ranks: Kernel) -> Iterator[Kernel]:
    """The shared kernel; its environment, folder, path, arguments and umask are put back afterwards."""
    ranks.ok("import os, sys; before = dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)")
    yield ranks
    ranks.ok(
        "os.environ.clear(); os.environ.update(before[0]); os.chdir(before[1]); _ = os.umask(0o022)\n"
        "sys.path[:], sys.argv[:] = before[2:]"
    )


def restart(kernel: Kernel) -> str:
    return kernel.ok("%distributed restart", HANG).stdout


def test_the_notebooks_environment_counts_as_it_is_at_start(notebook: Kernel) -> None:
    notebook.ok("os.environ['OF_THE_USER'] = 'é\\n2'; os.environ.pop('LANG', None); os.environ['LC_TIME'] = 'C'")
    assert "cold start" not in restart(notebook)
    assert pulled(notebook, "__import__('os').environ.get('OF_THE_USER')") == ["é\n2"] * 2
    assert pulled(notebook, "'LANG' in __import__('os').environ") == [False] * 2
    notebook.ok("os.environ['OF_THE_USER'] = 'later'")
    assert pulled(notebook, "__import__('os').environ['OF_THE_USER']") == ["é\n2"] * 2


def test_children_of_ranks_see_the_same_environment(notebook: Kernel) -> None:
    notebook.ok("os.environ['OF_THE_USER'] = 'passed on'")
    restart(notebook)
    assert notebook.ok("%%distributed\n!echo $OF_THE_USER").lines == both("passed on")


def test_the_notebooks_folder_path_arguments_and_umask_count(notebook: Kernel, tmp_path: Path) -> None:
    (tmp_path / "of_the_user.py").write_text("value = 'imported'")
    notebook.ok(f"os.chdir({str(tmp_path)!r}); sys.path.insert(0, ''); sys.argv[:] = ['train.py', '--fast']")
    notebook.ok("_ = os.umask(0o027)")
    restart(notebook)
    assert pulled(notebook, "__import__('os').getcwd()") == [str(tmp_path)] * 2
    assert pulled(notebook, "__import__('of_the_user').value") == ["imported"] * 2
    assert pulled(notebook, "__import__('sys').argv") == [["train.py", "--fast"]] * 2
    notebook.ok("%%distributed -r 1\nopen('made', 'w').close()")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o640
    assert pulled(notebook, "__import__('sys').path") == [notebook.value("sys.path")] * 2


def test_names_of_the_system_that_are_not_utf_8_arrive_byte_for_byte(notebook: Kernel, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    notebook.ok(
        f"odd = os.fsdecode(bytes([0xE9])); folder = {folder!r}; os.chdir(folder); os.environ['OF_' + odd] = odd\n"
        "sys.path.insert(0, os.fsdecode(folder)); sys.argv[:] = ['train.py', odd, chr(0xD83D)]"
    )
    assert "cold start" not in restart(notebook)
    assert pulled(notebook, "__import__('os').getcwdb()") == [folder] * 2
    assert pulled(notebook, "__import__('os').environb[b'OF_' + bytes([0xE9])]") == [b"\xe9"] * 2
    for name in ("path", "argv"):
        assert pulled(notebook, f"ascii(__import__('sys').{name})") == [notebook.value(f"ascii(sys.{name})")] * 2


def test_the_time_zone_counts(notebook: Kernel) -> None:
    notebook.ok("os.environ['TZ'] = 'Asia/Tokyo'")
    assert "cold start" not in restart(notebook)
    assert pulled(notebook, "__import__('time').strftime('%z')") == ["+0900"] * 2


def test_the_limit_of_open_files_is_the_notebooks(notebook: Kernel) -> None:
    notebook.ok("import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    notebook.ok("resource.setrlimit(resource.RLIMIT_NOFILE, (777, limits[1]))")
    restart(notebook)
    notebook.ok("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    assert pulled(notebook, "__import__('resource').getrlimit(7)[0]") == [777] * 2


def test_a_folder_that_was_removed_is_said_and_nothing_is_lost(notebook: Kernel, tmp_path: Path) -> None:
    notebook.ok("%%distributed\nkept = rank")
    (tmp_path / "gone").mkdir()
    notebook.ok(f"os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())")
    assert "current folder has been removed" in notebook.fails("%distributed restart", "UsageError").evalue
    assert pulled(notebook, "kept") == [0, 1]


# --- threads


def test_ranks_share_the_cores(notebook: Kernel) -> None:
    notebook.ok("os.environ.pop('OMP_NUM_THREADS', None)")
    restart(notebook)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert pulled(notebook, "__import__('torch').get_num_threads()") == [share] * 2
    assert pulled(notebook, "__import__('os').environ['OMP_NUM_THREADS']") == [str(share)] * 2


@pytest.mark.parametrize(("wanted", "threads"), [("3", 3), ("3,1", 3)])
def test_the_users_number_of_threads_counts(notebook: Kernel, wanted: str, threads: int) -> None:
    notebook.ok(f"os.environ['OMP_NUM_THREADS'] = {wanted!r}")
    assert "cold start" not in restart(notebook)
    assert pulled(notebook, "__import__('torch').get_num_threads()") == [threads] * 2
    assert pulled(notebook, "__import__('os').environ['OMP_NUM_THREADS']") == [wanted] * 2


def test_a_number_of_threads_that_is_none_keeps_no_rank_from_starting(notebook: Kernel) -> None:
    notebook.ok("os.environ['OMP_NUM_THREADS'] = 'many'")
    restart(notebook)


# --- torchrun's environment


def test_the_environment_is_torchruns(ranks: Kernel) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    found = pulled(ranks, f"[__import__('os').environ[name] for name in {names}]")
    assert found == [[str(rank), str(rank), "2", "2", "0", "127.0.0.1"] for rank in range(2)]
    ports = pulled(ranks, "int(__import__('os').environ['MASTER_PORT'])")
    assert ports[0] == ports[1] > 0


def test_torch_believes_that_torchrun_launched_it(ranks: Kernel) -> None:
    assert pulled(ranks, "__import__('torch').distributed.is_torchelastic_launched()") == [True] * 2


# --- what is read at import


def test_a_hash_seed_gives_a_cold_start_that_says_why(notebook: Kernel) -> None:
    template = find(notebook.pid, "template")
    notebook.ok("os.environ['PYTHONHASHSEED'] = '5'")
    printed = restart(notebook)
    assert "cold start: PYTHONHASHSEED changed after" in printed
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", "print(hash('nbdist'))"]
    expected = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert pulled(notebook, "hash('nbdist')") == [int(expected)] * 2
    assert find(notebook.pid, "template") != template
    assert "cold start" not in restart(notebook), "the new template already has it"


def test_torch_logs_gives_a_cold_start_and_takes_effect(notebook: Kernel) -> None:
    notebook.ok("os.environ['TORCH_LOGS'] = '+dynamo'; os.environ['TORCH_CPP_LOG_LEVEL'] = 'ERROR'")
    printed = restart(notebook)
    assert "cold start: " in printed and "TORCH_LOGS" in printed
    assert pulled(notebook, "__import__('logging').getLogger('torch._dynamo').getEffectiveLevel()") == [10] * 2


def test_another_torch_on_the_path_gives_a_cold_start_that_says_why(notebook: Kernel, tmp_path: Path) -> None:
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    notebook.ok(f"os.chdir({str(tmp_path)!r}); sys.path.insert(0, '')")
    printed = restart(notebook)
    assert "cold start: " in printed and f"sys.path leads to another torch ({tmp_path}" in printed
    assert pulled(notebook, "__import__('torch').__file__") == [str(tmp_path / "torch" / "__init__.py")] * 2


def test_a_package_that_was_replaced_gives_a_cold_start_that_says_why(tmp_path: Path) -> None:
    with Kernel(
        PYTHONPATH=os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ) as own:
        own.ok("%load_ext nbdist")
        own.ok("%distributed start -n 1", HANG)
        (tmp_path / "numpy-99.9.dist-info").mkdir()
        (tmp_path / "numpy-99.9.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: numpy\nVersion: 99.9\n"
        )
        assert "was replaced by 99.9" in restart(own)


def test_ranks_run_the_notebooks_nbdist_where_another_one_is_installed(tmp_path: Path) -> None:
    shutil.copytree(Path(nbdist.__file__).parent, tmp_path / "nbdist", ignore=shutil.ignore_patterns("__pycache__"))
    with Kernel() as own:
        own.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n%load_ext nbdist")
        own.ok("%distributed start -n 1", HANG)
        assert pulled(own, "__import__('nbdist').__file__") == [str(tmp_path / "nbdist" / "__init__.py")]
