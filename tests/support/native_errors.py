"""Errors that torch's native code raises, with a text of the test's."""

from __future__ import annotations

import torch


def from_native_code(text: str) -> RuntimeError:
    """An error that a function in C has raised, with this text in its own."""
    try:
        torch.device(text)
    except RuntimeError as error:
        return error
    raise AssertionError(f"{text!r} is a device")
