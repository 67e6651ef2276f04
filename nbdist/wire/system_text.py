"""Text that the system has named: file names, variables. It need not be UTF-8.

In Python's text the bytes that are not are lone surrogates, which no frame can hold. Such text is bytes between
`encode` and `StartOptions.__post_init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of plain types, with all in it that is neither list nor dict changed."""
    if isinstance(value, dict):
        return {change(key): mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def escaped(value: Any) -> Any:
    """The same without lone surrogates, for people to read."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def as_bytes(value: Any) -> Any:
    """The same, but text with lone surrogates as bytes, which `as_text` makes text again."""
    if not isinstance(value, str):
        return value
    encoded = value.encode(errors="surrogatepass")
    return encoded if any("\ud800" <= letter <= "\udfff" for letter in value) else value


def as_text(value: Any) -> Any:
    """What `as_bytes` has made of a value is text again."""
    return mapped(value, lambda item: item.decode(errors="surrogatepass") if isinstance(item, bytes) else item)
