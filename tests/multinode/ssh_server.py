"""An SSH server on loopback, with keys, a port and a client configuration of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from testbed.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class SshServer:
    """A server. Its aliases node-a and node-b are this machine; `locked` refuses our key, `closed` does not listen.

    Attributes:
        config: The client's configuration file.
        pid: The server's process id.
    """

    config: Path
    pid: int

    def nodes(self) -> list[int]:
        """The processes of `nbdist join` that it runs."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "nbdist.command" in "".join(process.cmdline()[2:3]):
                    found.append(process.pid)
        return sorted(found)


@contextlib.contextmanager
def ssh_server(folder: Path, elsewhere: Path | None = None) -> Iterator[SshServer]:
    """Run a server until the end. Skips the test where there is none.

    Args:
        folder: For its files.
        elsewhere: A folder that is another, empty one for the server and what it runs.
    """
    server = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("there is no `sshd` here (Debian calls its package openssh-server)")
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    port = free_port()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"""ListenAddress 127.0.0.1:{port}
HostKey {folder / "host"}
AuthorizedKeysFile {folder / "authorized_keys"}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
SetEnv PYTHONPATH={ROOT} ONLY_THERE=yes
"""
    )
    config = folder / "ssh_config"
    config.write_text(
        f"""Host closed
  Port 1
Host unknown
  HostName nowhere.invalid
Host stranger
  UserKnownHostsFile /dev/null
Host locked
  IdentityFile {folder / "stranger"}
Host * !locked
  IdentityFile {folder / "user"}
Host *
  HostName 127.0.0.1
  Port {port}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder / "known_hosts"}
  GlobalKnownHostsFile /dev/null
"""
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates privileges
    command = [server, "-D", "-e", "-f", str(folder / "sshd_config")]
    if elsewhere is not None:
        mount = f"mount -t tmpfs none {elsewhere} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", mount]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening" in line, line
        yield SshServer(config, process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=30)
