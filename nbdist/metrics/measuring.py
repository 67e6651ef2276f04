"""Begins to measure training steps in a process, with any version of torch."""

from __future__ import annotations

import re

from nbdist.metrics.node import active_meter


def start_steps() -> None:
    """Measure the steps of this process from now on, or have its meter say why they can't be. Again: a cell begins."""
    try:
        from nbdist.metrics import steps

        steps.start()
    except (ImportError, AttributeError) as error:  # private parts of torch, which this version lacks
        lacking = re.sub(r" \(.*\)$", "", str(error))  # without the file that it was looked for in
        active_meter.set_meter(active_meter.NoMeter(f"steps can't be measured with this version of PyTorch: {lacking}"))
