"""Errors of declarations: what pydantic finds in a value, in the words of this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from mm_assets.errors import ConfigError, meant

__all__ = ["config_error", "expected", "shown"]

_KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "keys and values",
    "string": "text",
}


def expected(schema: Mapping[str, Any]) -> str:
    """The allowed values of a JSON schema in words; the schema is as `DatasetSpec.model_json_schema` returns it."""
    if "anyOf" in schema:
        return ", or ".join(expected(option) for option in schema["anyOf"] if option["type"] != "null")
    if "enum" in schema:
        return ", ".join(schema["enum"])
    said = _KINDS[schema["type"]]
    items = schema.get("items", {})
    if items.get("type") == "string":
        said += f" of {' and '.join(items['enum'])}" if "enum" in items else " of texts"
    return said + (f" of at least {schema['minimum']}" if "minimum" in schema else "")


def config_error(found: ErrorDetails, where: str, root: Mapping[str, Any]) -> ConfigError:
    """One of pydantic's errors, worded as all errors of declarations; `root` is the JSON schema of the declaration."""
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # of a filter, an annotator or the packing
        return ConfigError(where, cause.key, cause.detail)
    schema, parent, key = root, root, ""
    for part in found["loc"]:
        if part == "[key]":  # pydantic's notation for a wrong key
            continue
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
        options = schema.get("properties", {})
        schema = (schema.get("items") if isinstance(part, int) else options.get(part)) or {"type": "string"}
        if "$ref" in schema:
            parent = schema = root["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    detail = f"is {shown(found['input'])}, expected {expected(schema)}"
    if cause is not None:
        detail = str(cause)
    elif found["type"] == "missing":
        detail = f"is missing: {schema['description'].rstrip('.')}"
    elif found["type"] == "extra_forbidden":
        known = sorted(parent["properties"])
        detail = f"is not a setting; allowed here: {', '.join(known)}{meant(found['loc'][-1], known)}"
        if found["loc"][-1] in known:
            detail = "is another name of a setting that is given too: give one of them"
    elif found["type"] == "literal_error":
        detail = f"is {found['input']!r}, allowed: {expected(schema)}{meant(found['input'], schema.get('enum', ()))}"
    return ConfigError(where, key.lstrip(".") or "declaration", detail)


def shown(value: object) -> str:
    """What was found where another value is expected."""
    empty = value is None or (isinstance(value, str) and not value.strip())
    return "empty" if empty else f"{type(value).__name__} {value!r}"
