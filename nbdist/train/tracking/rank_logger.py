"""Loggers for code that runs on all ranks: a message comes once, not once for each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from nbdist.train import state as training
from nbdist.train.collective.turns import is_main_process, wait_for_everyone

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no parameter before Python 3.11


class RankLogger(_Adapter):
    """A logger of Python's `logging`, whose methods take two more arguments.

    `main_process_only` (True): whether only rank 0 logs. `in_order` (False): whether ranks log one after the other,
    with `main_process_only=False`; then all ranks must call it.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the ranks that are to."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2  # what is shown is the user's line
        if in_order and not main_only:
            for number in range(training.world_size()):
                if number == training.rank() and self.isEnabledFor(level):
                    self._emit(level, msg, args, kwargs)
                wait_for_everyone()
        elif self.isEnabledFor(level) and (is_main_process() or not main_only):
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]) -> None:
        text, kwargs = self.process(msg, kwargs)
        self.logger.log(level, text, *args, **kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning, but the same message only once."""
        if (key := (self.name, str(msg))) not in _warned:
            _warned.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


_warned: set[tuple[str, str]] = set()


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger whose messages come from rank 0 alone, unless a call says `main_process_only=False`.

    >>> logger = nbdist.get_logger(__name__, "INFO")
    >>> logger.info("loaded", main_process_only=False, in_order=True)

    Args:
        name: As with `logging.getLogger`.
        log_level: Such as "INFO"; by default that of ACCELERATE_LOG_LEVEL in the environment, else it is left as it is.
    """
    logger = logging.getLogger(name)
    level = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return RankLogger(logger, {})
