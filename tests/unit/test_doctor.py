"""`nbdist doctor`: what this machine lacks to be part of a session."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from typing import NamedTuple

import pytest

from nbdist.cluster import doctor


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def finding(subject: str, target: str = "") -> doctor.Finding:
    return next(found for found in doctor.examine(target) if found.subject == subject)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbdist", "doctor", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_machine_that_works_has_no_problem() -> None:
    found = run()
    assert found.returncode == 0 and "torch" in found.stdout, found


def test_the_way_to_a_session_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert finding("session", address).level == "ok"
    found = run(address)
    assert found.returncode == 1 and "Connection refused" in found.stdout, found


def test_a_host_name_that_means_loopback_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entry)
    found = finding("host name")
    assert found.level == "note" and "/etc/hosts" in found.text


def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    found = finding("shared memory")
    assert found.level == "note" and "64.0 MiB" in found.text


def test_an_address_without_a_port_is_refused() -> None:
    found = run("10.0.0.1")
    assert found.returncode == 2 and "is not an address with a port" in found.stderr
