"""The tables of fields, and how declarations and packed files name one; `fields.builtin` fills them.

A type id is never reused for another field. Ids from 0x8000 to 0xFFFF are the user's, by `register_field`; all others
belong to this package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from mm_assets.errors import ConfigError, MissingExtraError, meant
from mm_assets.fields.base import JSON, Field
from mm_assets.fields.user_code import code_digest, is_own

__all__ = [
    "FIELD_NAMES",
    "FIELD_TYPES",
    "complete_config",
    "field_from_config",
    "field_from_declaration",
    "import_field",
    "load_class",
    "register_field",
    "unregistered",
]

_REQUIRED = "required"  # in a stored configuration: settings without which its payloads must not be decoded
_LOG = logging.getLogger(__name__)

FIELD_TYPES: dict[int, type[Field]] = {}
"""Type id to class: those of `fields.builtin`, and the user's."""

FIELD_NAMES: dict[str, type[Field]] = {}
"""Class name to class: what a file's schema and a YAML declaration name."""

USER_TYPE_IDS = range(0x8000, 0x10000)


def register_field(cls: type[Field]) -> type[Field]:
    """Make a user's field known by its name and type id; usable as a class decorator, and more than once.

    Raises:
        ConfigError: not a concrete field, a type id outside 0x8000..0xFFFF, or an id or name that another class has.
    """
    where = getattr(cls, "__qualname__", repr(cls))
    if not (isinstance(cls, type) and issubclass(cls, Field)) or inspect.isabstract(cls):
        raise ConfigError(where, "field", "is not a complete Field, expected a subclass with encode and decode")
    type_id = getattr(cls, "TYPE_ID", None)
    if not isinstance(type_id, int) or type_id not in USER_TYPE_IDS:
        raise ConfigError(where, "TYPE_ID", f"found {type_id!r}, expected 0x8000 to 0xFFFF")
    if FIELD_TYPES.get(type_id, cls) is not cls:
        raise ConfigError(where, "TYPE_ID", f"{type_id:#06x} is already taken by {FIELD_TYPES[type_id].__qualname__}")
    if FIELD_NAMES.get(cls.__name__, cls) is not cls:
        raise ConfigError(where, "field", f"the name {cls.__name__} is already taken")
    FIELD_TYPES[type_id] = cls
    FIELD_NAMES[cls.__name__] = cls
    return cls


def field_from_config(type_name: object, config: Mapping[str, JSON] | None = None, *, trusted: bool = True) -> Field:
    """Make a field from its class name and configuration, as a file's schema holds them.

    Args:
        type_name: the class name.
        config: its settings; those that are not given have their defaults.
        trusted: whether the caller wrote `config`. A packed file's may name a tokenizer, but not load one: such a
            setting would open a file of this machine, or run a parser over the file's own text. Nor may it raise a
            field's `LIMITS`: only the reader's own settings do. Settings that a later release added are ignored there,
            unless the file lists them as ``required``.

    Raises:
        ConfigError: an unknown name, or a setting that its class does not take.
    """
    cls = FIELD_NAMES.get(type_name) if isinstance(type_name, str) else None
    if cls is None:
        known = ", ".join(sorted(FIELD_NAMES))
        raise ConfigError(
            "arguments",
            "field",
            f"found {type_name!r}, expected one of {known}; or your own as module:Class{meant(type_name, FIELD_NAMES)}",
        )
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError("arguments", type_name, f"found {type(config).__name__}, expected a mapping of settings")
    if not trusted:
        _refuse_tokenizers(config or {})
        config = _within_limits(cls, config or {})
    return cls.from_config(config or {})


def field_from_declaration(type_name: object, config: Mapping[str, JSON] | None = None) -> Field:
    """Make a field as `field_from_config` does, for what the user wrote: a YAML declaration or a command.

    Args:
        type_name: the class name, or the import path ``module:Class`` of the user's own, which is then registered.
        config: its settings; the ``type`` of an inner field likewise.

    Raises:
        ConfigError: as `field_from_config` and `register_field`, or the import fails.
    """
    if isinstance(config, Mapping):
        config = {
            key: {**value, "type": _registered(value["type"])}
            if isinstance(value, Mapping) and "type" in value
            else value
            for key, value in config.items()
        }
    return field_from_config(_registered(type_name), config)


def _registered(type_name: object) -> object:
    """The class name of an import path; any other name unchanged."""
    if not isinstance(type_name, str) or ":" not in type_name:
        return type_name
    return import_field(type_name).__name__


def import_field(path: str) -> type[Field]:
    """Imports and registers the user's field that an import path ``module:Class`` names.

    For what the user wrote alone: no path that was read from a file comes here.

    Raises:
        ConfigError: the import fails, or as `register_field`.
    """
    try:
        return register_field(load_class(path, Field))
    except ConfigError as error:
        raise ConfigError("arguments", "field", error.detail) from error


def unregistered(type_name: str, config: Mapping[str, JSON]) -> str | None:
    """The class that a stored modality names and nothing here is registered by: its own, or that of its items."""
    inner = config.get("inner")
    named = (type_name, inner.get("type") if isinstance(inner, Mapping) else None)
    return next((name for name in named if isinstance(name, str) and name not in FIELD_NAMES), None)


def load_class(path: str, base: type) -> type[Any]:
    """The concrete class derived from `base` that an import path ``module:Class`` names.

    Raises:
        ConfigError: the module cannot be imported, or has no such class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the name may be empty or relative, and a module is its author's code
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError("arguments", "type", f"is {path!r}, whose module cannot be imported: {said}") from error
    found = getattr(module, class_name, None) if class_name else None
    if not (isinstance(found, type) and issubclass(found, base)):
        detail = f"is {path!r}, which is {found!r}, expected a class derived from {base.__name__}"
        raise ConfigError("arguments", "type", detail)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError("arguments", "type", f"is {path!r}, which does not implement {missing}")
    if not is_own(found):
        code_digest(found)  # as it is imported
    return found


def complete_config(type_name: object, config: Mapping[str, JSON]) -> dict[str, JSON]:
    """A stored configuration with the defaults of later settings; unchanged where its field is not known here.

    So equal settings compare equal, whichever release wrote the files.
    """
    try:
        return field_from_config(type_name, config, trusted=False).config
    except (ConfigError, MissingExtraError):
        return dict(config)


def _without_later_settings(cls: type[Field], config: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """A stored configuration without settings that are not known here (docs/spec/fields.md).

    Raises:
        ConfigError: the file says that decoding depends on one of them.
    """
    known = {one.name for one in dataclasses.fields(cls)} | set(cls.FORMER)
    reads_others = cls.from_config.__func__ is not Field.from_config.__func__  # type: ignore[attr-defined]
    if _REQUIRED in known or (reads_others and not is_own(cls)):
        return config
    required = config.get(_REQUIRED, [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ConfigError("arguments", _REQUIRED, f"found {required!r}, expected a list of settings")
    if missing := ", ".join(sorted(set(required) - known)):
        detail = f"found settings that this version of {cls.__name__} does not know: {missing}; update mm-assets"
        raise ConfigError("arguments", _REQUIRED, detail)
    later = sorted(config.keys() - known - {_REQUIRED})
    if later:
        _LOG.warning("settings of a later version of %s are ignored: %s", cls.__name__, ", ".join(later))
    return {name: value for name, value in config.items() if name in known}


def _within_limits(cls: type[Field], config: Mapping[str, JSON]) -> dict[str, JSON]:
    """A stored configuration with no limit above its default, and what earlier releases did; also in inner fields."""
    config = _without_later_settings(cls, config)
    defaults = {one.name: one.default for one in dataclasses.fields(cls)}
    tame = {**cls.EARLIER, **config}
    for name, value in config.items():
        default = defaults.get(name)
        if name in cls.LIMITS and isinstance(value, int) and isinstance(default, int):
            tame[name] = min(value, default)
        elif isinstance(default, Field) and isinstance(value, Mapping):
            tame[name] = _within_limits(type(default), value)
        elif isinstance(value, Mapping) and isinstance(value.get("config"), Mapping):
            inner = FIELD_NAMES.get(str(value.get("type")))
            tame[name] = value if inner is None else {**value, "config": _within_limits(inner, value["config"])}
    return tame


def _refuse_tokenizers(config: Mapping[str, JSON]) -> None:
    for key, value in config.items():
        if key == "tokenizer" and isinstance(value, Mapping) and value.keys() & {"file", "json"}:
            raise ConfigError("arguments", key, "contains a tokenizer, expected its name and SHA-256 in a packed file")
        if isinstance(value, Mapping):
            _refuse_tokenizers(value)
