"""Source trees that go to other machines with `--sync`. The other machine has another, empty folder at their place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel
from tests.conftest import sharing
from tests.multinode.ssh_server import SshServer, ssh_server


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook's folder, with a package in `src` that is not installed."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "src" / "mine"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("HERE = 'synced'\n")
    (package / "__pycache__" / "left.pyc").write_bytes(bytes(9))
    (folder / "note.txt").write_text("outside")
    (package / "link.txt").symlink_to(folder / "note.txt")
    (folder / "data").mkdir()
    with open(folder / "data" / "large", "wb") as file:
        file.truncate(65 << 20)
    return folder


@pytest.fixture(scope="module")
def server(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    if shutil.which("rsync") is None:
        pytest.skip("there is no `rsync` here")
    if os.geteuid() != 0:
        pytest.skip("another file system for the server needs root")
    with ssh_server(tmp_path_factory.mktemp("ssh"), project) as found, sharing(found):
        yield found


@pytest.fixture(scope="module")
def kernel(server: SshServer, project: Path) -> Iterator[Kernel]:
    """A notebook without a session, in the project's folder."""
    with Kernel() as found, sharing(found):
        found.ok(f"%load_ext nbdist\n%cd {project}\nimport sys\nsys.path.insert(0, '{project}/src')")
        yield found


def start(server: SshServer, arguments: str) -> str:
    return f"%distributed start --ssh-config {server.config} --hosts localhost:0,node-a {arguments} -n 1"


def test_a_tree_is_copied_to_its_path_there_and_what_is_copied_is_shown(
    kernel: Kernel, server: SshServer, project: Path
) -> None:
    outcome = kernel.ok(start(server, "--sync src"))
    assert f"copying {project}/src (2 files, 23 B) to node-a" in outcome.stdout, str(outcome)
    files = "sorted(os.listdir('src/mine')), open('src/mine/link.txt').read()"
    code = f"import os, mine\nprint(mine.HERE, os.listdir('.'), {files})"
    said = kernel.run(f"%%distributed\n{code}").stdout
    assert "synced ['src'] ['__init__.py'" in said and "'link.txt'] outside" in said, said
    kernel.ok("%distributed stop")


def test_without_it_the_code_is_not_there(kernel: Kernel, server: SshServer, project: Path) -> None:
    other = project / "other"
    other.mkdir()
    (other / "theirs.py").write_text("")
    kernel.ok(f"sys.path.insert(0, '{other}')")
    kernel.ok(start(server, ""))
    assert kernel.run("%%distributed\nimport theirs").ename == "RankError"
    kernel.ok("%distributed stop")


def test_a_copy_that_fails_is_one_message(kernel: Kernel, server: SshServer) -> None:
    arguments = f"--ssh-config {server.config} --hosts locked --master-addr 127.0.0.1 --sync src"
    outcome = kernel.fails(f"%distributed start {arguments} -n 1", "SessionBroken")
    assert "--sync to host 'locked' failed: " in outcome.evalue, str(outcome)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts node-a --sync data", "--sync is for source code: 64.0 MiB and 20,000 files at most"),
        ("--hosts node-a --sync nowhere", "does not exist"),
        ("--slurm --num-nodes 2 --sync src", "--sync copies by ssh, so it is for --hosts: with --slurm"),
        ("--sync src", "--sync is for machines that nbdist starts: add `--hosts node-a`"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(kernel: Kernel, arguments: str, words: str) -> None:
    assert words in kernel.fails(f"%distributed start {arguments} -n 1", "UsageError").evalue
