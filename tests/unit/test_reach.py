"""Sessions that are named, and can't be reached: each is refused with the reason."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbdist import visits
from nbdist._version import __version__
from nbdist.errors import UsageError
from nbdist.wire.base.keys import Home

NAME = "0123abcd"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"nbdist-{NAME}ffffffff.json"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where somebody listens who never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def write(path: Path, url: str = "tcp://127.0.0.1:9", **changed: Any) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    fields = {"url": url, "server_key": public, "public_key": public, "secret_key": secret}
    path.write_text(json.dumps(fields | {"host": os.uname().nodename, "version": __version__, "kernel": 1} | changed))


def refused(name: str = NAME) -> str:
    with pytest.raises(UsageError) as caught:
        visits.reach(name)
    return str(caught.value)


def test_another_machine_is_named(key_file: Path) -> None:
    write(key_file, host="node-b")
    assert refused() == f"session {NAME} runs on node-b, and this is {Home.here().host}: attach there"


def test_another_version_is_named(key_file: Path) -> None:
    write(key_file, version="99.1")
    assert "runs nbdist 99.1, and this is" in refused()


def test_another_user_is_named(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(key_file)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert f"belongs to another user (uid {owner}, who owns" in refused()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_file_that_holds_no_keys_is_a_session_that_has_ended(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    assert refused(NAME[:3]) == f"session {NAME} has ended. `nbdist ls` shows the others"


def test_a_session_where_nobody_listens_has_ended(key_file: Path) -> None:
    write(key_file)
    assert refused() == f"session {NAME} has ended. `nbdist ls` shows the others"


def test_a_session_that_does_not_answer_is_named(key_file: Path, silent: str) -> None:
    write(key_file, silent)
    assert refused() == f"session {NAME} does not answer. `nbdist stop {NAME}` ends it"


def test_a_name_that_fits_none_or_several_is_refused(key_file: Path) -> None:
    assert refused("x") == (
        "there is no session 'x': you have none on this machine. `nbdist ls` describes them, "
        "`nbdist stop --all` ends all"
    )
    write(key_file, host="node-b")
    write(key_file.with_name("nbdist-0123efffffffffff.json"), host="node-b")
    assert refused("0123").startswith("'0123' means 2 sessions")
