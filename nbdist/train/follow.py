"""How a process takes on another plan while it runs. Knows nothing of who decided that, and imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nbdist.planning.variables import NAMES
from nbdist.train import active_training


def follow(environment: Mapping[str, str]) -> None:
    """Have what is prepared from now on follow the plan in these variables. What is prepared already keeps its own.

    Args:
        environment: NBDIST_PLAN, and what `Plan.environment` gives; variables of an earlier plan are removed.
    """
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    training = active_training.training
    if training is not None and not training.is_begun():
        training.forget()  # the next one begins with this plan
