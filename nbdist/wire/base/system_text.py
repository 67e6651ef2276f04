"""Text named by the system: file names, variables. It need not be UTF-8.

In Python, bytes that are not UTF-8 become lone surrogates, which no frame can hold. Such text is sent as bytes, between
`encode` and `StartOptions.__post_init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mapped(value: object, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of a value made of lists and dicts."""
    if isinstance(value, dict):
        return {change(key): mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def escaped(value: object) -> Any:
    """Return the same value with lone surrogates escaped, for people to read."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def as_bytes(value: object) -> Any:
    """Return the same value with text that has lone surrogates as bytes; `as_text` reverses it."""
    if not isinstance(value, str):
        return value
    encoded = value.encode(errors="surrogatepass")
    return encoded if any("\ud800" <= letter <= "\udfff" for letter in value) else value


def as_text(value: object) -> Any:
    """Reverse `as_bytes`."""
    return mapped(value, lambda item: item.decode(errors="surrogatepass") if isinstance(item, bytes) else item)
