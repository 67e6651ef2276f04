"""Values that JSON has: what displays and widgets send to pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
else:
    JsonValue = Any  # msgspec has no recursive types

MimeBundle: TypeAlias = dict[str, JsonValue]  # by MIME type, or by what a front end looks up
