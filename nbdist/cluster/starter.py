"""The process that starts the other nodes of a session, by an engine, and ends them with itself.

A child of the controller: a slow ssh never blocks that, and it outlives a kernel that was killed. When its standard
input ends, however that came about, it ends all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import msgspec

from nbdist.base import end_signals
from nbdist.base.processes import adopt_orphans, end_descendants
from nbdist.cluster.engines.engine import load
from nbdist.errors import UsageError
from nbdist.wire.processes.starter_lines import Report, StarterFailed, StarterSetup, encode_report


def main() -> None:
    """Run the engine that the first line on standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_signals.ignore()
    adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    try:
        _run(msgspec.json.decode(sys.stdin.buffer.readline(), type=StarterSetup))
    except msgspec.DecodeError:
        pass  # the controller is gone before it sent its setup
    finally:
        end_descendants()


def _run(setup: StarterSetup) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        kind = load(setup.engine)
        engine = kind(msgspec.json.decode(setup.options, type=kind.Options))
    except (UsageError, msgspec.DecodeError) as error:
        _report(StarterFailed(str(error)))
        return
    try:
        engine.start(setup.invitation)
        for report in engine.watch():
            _report(report)
    except (UsageError, OSError) as error:
        _report(StarterFailed(str(error)))
    except Exception as error:  # maybe somebody else's engine
        _report(StarterFailed(f"the cluster engine {setup.engine!r} failed: {type(error).__name__}: {error}"))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.stop()


def _end_with_input() -> None:
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _end(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends everything must not be interrupted
    raise SystemExit(0)


def _report(report: Report) -> None:
    with contextlib.suppress(BrokenPipeError):  # the controller is gone, and our input is about to end
        sys.stdout.buffer.write(encode_report(report))
        sys.stdout.buffer.flush()
