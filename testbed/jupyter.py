"""A Jupyter server as a user starts it: what its websocket and its page are tested and measured with."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from testbed.kernel import LIMIT, wait_until
from testbed.ports import free_port

_END = 20.0  # seconds: it gives its kernels five to end


class Server:
    """A server that answers.

    Args:
        folder: Its notebooks, configuration and log.
        module: What runs: `jupyter_server` or `jupyterlab`.
        options: Of its command line.
        environment: Besides the environment of this process.
    """

    def __init__(
        self, folder: Path, module: str = "jupyter_server", *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", module, "--no-browser", "--allow-root", f"--ServerApp.port={port}"]
        command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}", *options]
        own = {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_NO_CONFIG": "1", "PYTHONFAULTHANDLER": "1"}
        own |= environment or {}
        self._command, self._environment = command, {**os.environ, **own}
        self.start()

    def start(self) -> None:
        """Start it; also again, at the same address, once it has ended."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )
        self.pid = self.process.pid
        wait_until(self._answers, "Jupyter's server to answer", LIMIT)

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def call(self, path: str, data: dict[str, Any] | None = None) -> Any:
        """What it answers to a request, which is a POST where there are data."""
        body = None if data is None else json.dumps(data).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=LIMIT) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            self.call("/api/status")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def close(self, signum: int = signal.SIGTERM) -> None:
        """End it; kill it if it has nothing left but a thread of anyio's that nobody stops, as happens now and then."""
        self.process.send_signal(signum)
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its log then has where each thread was
            self.process.wait(LIMIT)
            left = self._log.read_text().rpartition("Fatal Python error: Aborted")[2]
            if "in _shutdown" not in left or "anyio/_backends" not in left:
                raise AssertionError(f"the server did not end in {_END:g} s: {left}") from None
