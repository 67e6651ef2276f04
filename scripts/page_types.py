"""Writes what labextension/types.mjs makes TypeScript of: the JSON Schema of all that crosses to pages, and constants.

    python scripts/page_types.py | node labextension/types.mjs FILE

A message that is added to one of the unions below is found by itself.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.inspect import Field, StructType, Type, multi_type_info

from nbdist.wire.pages.machine_messages import MACHINE_PROTOCOL, Machine, NamedSession
from nbdist.wire.pages.page_messages import PAGE_PROTOCOL, News, PageCall, PageOpening, PageRequest
from nbdist.wire.pages.panel_messages import (
    HISTORY,
    LEVELS,
    TREND_POINTS,
    NodeRow,
    PanelNews,
    PanelOpening,
    PanelWish,
    RankRow,
)
from nbdist.wire.pages.targets import PAGE_TARGET, PANEL_TARGET

TO_PAGE = {"News": News, "PanelNews": PanelNews, "RankRow": RankRow, "NodeRow": NodeRow, "Machine": Machine}
FROM_PAGE = {
    "PageOpening": PageOpening,
    "PageCall": PageCall,
    "PageRequest": PageRequest,
    "PanelOpening": PanelOpening,
    "PanelWish": PanelWish,
    "NamedSession": NamedSession,
}
CONSTANTS = {
    "PAGE_TARGET": PAGE_TARGET,
    "PAGE_PROTOCOL": PAGE_PROTOCOL,
    "PANEL_TARGET": PANEL_TARGET,
    "MACHINE_PROTOCOL": MACHINE_PROTOCOL,
    "HISTORY": HISTORY,
    "TREND_POINTS": TREND_POINTS,
    "LEVELS": LEVELS,
}

Schema = dict[str, Any]

_PLACE = "#/definitions/"
_ATTRIBUTE = re.compile(r"(\w+): ")


def main() -> None:
    """Write it to stdout."""
    json.dump({"constants": CONSTANTS, "schema": schema_of_wire()}, sys.stdout, indent=1)


def schema_of_wire() -> Schema:
    """Return a schema that refers to all that crosses.

    Raises:
        ValueError: A struct goes both ways: a page that sends it may leave out what it always gets.
    """
    sent, received = _components(TO_PAGE), _components(FROM_PAGE)
    both = sorted(name for name in sent.keys() & received.keys() if "properties" in sent[name])
    if both:
        raise ValueError(f"these go to pages and come from them: {', '.join(both)}")
    _require_what_is_always_sent(sent)
    roots = [*TO_PAGE, *FROM_PAGE]
    return {
        "description": "All that crosses.",
        "type": "object",
        "properties": {name: {"$ref": _PLACE + name} for name in roots},
        "required": roots,
        "definitions": {**sent, **received},
    }


def _components(roots: dict[str, Any]) -> dict[str, Schema]:
    schemas, components = msgspec.json.schema_components(roots.values(), ref_template=_PLACE + "{name}")
    named = {name: schema for name, schema in zip(roots, schemas, strict=True) if "$ref" not in schema}
    found: dict[str, Schema] = {}
    for name, schema in {**named, **components}.items():
        found[name] = _with_names(_documented(schema), found)
    return found


def _require_what_is_always_sent(components: dict[str, Schema]) -> None:
    """Defaults are sent, too, except by a struct that omits them."""
    for struct in _structs(multi_type_info(TO_PAGE.values())):
        schema, omits = components[struct.__name__], struct.__struct_config__.omit_defaults
        optional = {
            field.encode_name
            for field in msgspec.structs.fields(struct)
            if field.default is UNSET or (omits and not field.required)
        }
        schema["required"] = [name for name in schema["properties"] if name not in optional]
    for schema in components.values():
        if "maxItems" in schema:  # a tuple
            schema["minItems"] = schema["maxItems"]


def _structs(part: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a type is made of."""
    if isinstance(part, StructType):
        yield part.cls
    if isinstance(part, (Type, Field)):
        part = msgspec.structs.astuple(part)
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from _structs(each)


def _documented(schema: Schema) -> Schema:
    """Return a schema whose description is split: each line of its attributes belongs to one of them."""
    text, _, attributes = _text_of(schema).partition("\n\nAttributes:\n")
    of_each = dict(_described(attributes))
    properties = {
        name: {"allOf": [value], "description": of_each[name]} if name in of_each else value
        for name, value in schema.get("properties", {}).items()
    }
    return {**schema, "description": text, **({"properties": properties} if properties else {})}


def _text_of(schema: Schema) -> str:
    return re.sub(r"\bNone\b", "null", inspect.cleandoc(schema.get("description", "")))


def _described(attributes: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=\w)", inspect.cleandoc(attributes)):
        if match := _ATTRIBUTE.match(entry):
            yield match[1], " ".join(entry[match.end() :].split())


def _with_names(schema: Any, found: dict[str, Schema], *, top: bool = True) -> Any:
    """Return a schema in the older words that the generator knows; parts with a title of their own move to `found`."""
    if isinstance(schema, list):
        return [_with_names(each, found, top=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_names(value, found, top=False) for key, value in schema.items() if key != "discriminator"}
    if "prefixItems" in plain:
        plain["additionalItems"] = plain.pop("items", plain.get("maxItems") is None)
        plain["items"] = plain.pop("prefixItems")
    if top or not isinstance(title := schema.get("title"), str):
        return plain
    found[title] = plain
    return {"$ref": _PLACE + title}


if __name__ == "__main__":
    main()
