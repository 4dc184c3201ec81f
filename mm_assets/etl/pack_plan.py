"""The pack plan: which rows go to which packed modality, and by which field.

A plan is decided once for a dataset and stored as JSON. A row goes to the first packed modality, in the plan's order,
whose selector takes it and whose field accepts its content; what nobody takes goes to the `rest` of a plan that has one
and is dropped with a reason otherwise. Nothing here looks at content.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mm_assets.errors import ConfigError, SchemaMismatchError
from mm_assets.fields import BytesField, Field, JSONField, SequenceField, field_from_config
from mm_assets.formats import ModalitySpec, name_hash

__all__ = ["NUMBERED", "PackPlan", "PackedModality", "Selector", "Take", "parse_fields"]

Take = Literal["one", "sequence", "metadata", "rest", "listing"]

MAX_MODALITIES = 32  # MULT's mask has 32 bits
NUMBERED = "#"  # a role pattern: any whole number, as in x.0.png, x.1.png
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which rows a packed modality takes.

    Attributes:
        modality: row modality; "*" is any.
        role: pattern (``*``, ``?``, ``[abc]``) for what stands between key and extension in the member's name; "" is no
            role and "#" a whole number.
        extension: patterns for the member's extension. For `take` "one" their order is an order of preference.
        take: "one" content row of a sample, the first by preference and position; a "sequence" of all of them at their
            positions; the sample's "metadata"; the "rest" that no other takes, numbered as the sample's content rows
            are; or a "listing" of where each content row went.
    """

    modality: str = "*"
    role: str = "*"
    extension: tuple[str, ...] = ("*",)
    take: Take = "one"

    def rank(self, modality: str, role: str, extension: str) -> int | None:
        """Place of a content row's extension in the order of preference, or None where the row is not taken."""
        if self.take not in ("one", "sequence") or self.modality not in ("*", modality):
            return None
        if not (_DIGITS.fullmatch(role) if self.role == NUMBERED else fnmatch.fnmatchcase(role, self.role)):
            return None
        for rank, pattern in enumerate(self.extension):
            if fnmatch.fnmatchcase(extension, pattern):
                return rank
        return None

    def to_json(self) -> dict[str, Any]:
        """The selector as plans store it."""
        return {"modality": self.modality, "role": self.role, "extension": list(self.extension), "take": self.take}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModality:
    """A named field of every packed sample, and the rows that fill it.

    Attributes:
        name: unique in the plan.
        field_type: class name of the field.
        config: the field's configuration.
        selector: the rows.
    """

    name: str
    field_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    selector: Selector = field(default_factory=Selector)

    @classmethod
    def of(cls, name: str, value: Field, selector: Selector) -> PackedModality:
        """The modality that a field object fills."""
        return cls(name=name, field_type=type(value).__name__, config=value.config, selector=selector)

    def field(self) -> Field:
        """The field object."""
        return field_from_config(self.field_type, self.config)

    def to_json(self) -> dict[str, Any]:
        """The modality as plans store it."""
        return {"name": self.name, "field": self.field_type, "config": dict(self.config), **self.selector.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """What registration decided about packing; every partition of the dataset follows it.

    Attributes:
        preset: the preset that it came from, "" where fields alone were given.
        modalities: the packed modalities, in the order of the packed files.
    """

    preset: str
    modalities: tuple[PackedModality, ...]

    def fields(self) -> dict[str, Field]:
        """Name to field, in the order of the packed files."""
        return {modality.name: modality.field() for modality in self.modalities}

    def specs(self) -> tuple[ModalitySpec, ...]:
        """What the containers are told of the fields."""
        return tuple(
            ModalitySpec(
                name=name,
                type_id=value.TYPE_ID,
                metadata_size=value.metadata_type.itemsize,
                type_name=type(value).__name__,
                config=value.config,
            )
            for name, value in self.fields().items()
        )

    def special(self, take: Take) -> int | None:
        """Number of the modality that is the plan's metadata, rest or listing, or None where it has none."""
        return next((n for n, m in enumerate(self.modalities) if m.selector.take == take), None)

    def to_json(self) -> dict[str, Any]:
        """The plan as `schema.json` stores it; `from_json` reads it back."""
        return {"preset": self.preset, "modalities": [modality.to_json() for modality in self.modalities]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> PackPlan:
        """Reads a stored plan.

        Raises:
            SchemaMismatchError: `value` is no plan, or names a field that is not known here.
        """
        try:
            modalities = parse_fields(value["modalities"], where=where, key="pack.modalities")
            if not isinstance(value["preset"], str):
                raise TypeError(f"preset is {value['preset']!r}")
            return cls(
                preset=value["preset"], modalities=check_modalities(modalities, where=where, key="pack.modalities")
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise SchemaMismatchError(f"{where}: not a pack plan: {error}") from error


_KEYS = ("name", "field", "config", "modality", "role", "extension", "take")


def parse_fields(value: object, *, where: object, key: str) -> tuple[PackedModality, ...]:
    """Reads a list of packed modalities, as declarations and stored plans have it.

    Each is a mapping with ``name``, ``field``, and optionally ``config``, ``modality``, ``role``, ``extension`` (a
    pattern or a list of them) and ``take``. With ``take: sequence`` the field may be that of an item.

    Raises:
        ConfigError: a key or value is not allowed; the message says what is.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(where, key, f"is {value!r}, expected a list of fields")
    return tuple(_parse_field(item, where, f"{key}[{number}]") for number, item in enumerate(value))


def _parse_field(value: object, where: object, key: str) -> PackedModality:
    if not isinstance(value, Mapping):
        raise ConfigError(where, key, f"is {value!r}, expected keys and values: {', '.join(_KEYS)}")
    for name in value:
        if name not in _KEYS:
            raise ConfigError(where, f"{key}.{name}", f"is not a key of a packed field; allowed: {', '.join(_KEYS)}")
    name = _text(value, "name", None, where, key)
    type_name = _text(value, "field", None, where, key)
    try:
        made = field_from_config(type_name, value.get("config"))
    except ConfigError as error:
        where_in = "field" if error.key == "field" else f"config.{error.key}"
        raise ConfigError(where, f"{key}.{where_in}", error.detail) from error
    take = value.get("take", "sequence" if isinstance(made, SequenceField) else "one")
    if take not in get_args(Take):
        raise ConfigError(where, f"{key}.take", f"is {take!r}, allowed: {', '.join(get_args(Take))}")
    if take == "sequence" and not isinstance(made, SequenceField):
        made = SequenceField(made)
    _check_field(made, take, where, f"{key}.field")
    selector = Selector(
        modality=_text(value, "modality", "*", where, key),
        role=_text(value, "role", "*", where, key, empty=True),
        extension=_patterns(value.get("extension", "*"), where, f"{key}.extension"),
        take=take,
    )
    return PackedModality.of(name, made, selector)


def _check_field(made: Field, take: Take, where: object, key: str) -> None:
    expected = {
        "one": "a field other than SequenceField, or take: sequence",
        "metadata": "JSONField",
        "listing": "JSONField",
        "rest": "SequenceField of BytesField",
        "sequence": "SequenceField",
    }[take]
    fits = {
        "one": not isinstance(made, SequenceField),
        "metadata": isinstance(made, JSONField),
        "listing": isinstance(made, JSONField),
        "rest": made == SequenceField(BytesField()),
        "sequence": isinstance(made, SequenceField),
    }[take]
    if not fits:
        raise ConfigError(where, key, f"is {type(made).__name__} with take: {take}, expected {expected}")


def _text(
    value: Mapping[str, object], name: str, default: str | None, where: object, key: str, *, empty: bool = False
) -> str:
    found = value.get(name, default)
    if not isinstance(found, str) or not (found or empty):
        state = "is missing" if name not in value else f"is {found!r}"
        raise ConfigError(where, f"{key}.{name}", f"{state}, expected text")
    return found


def _patterns(value: object, where: object, key: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not found or not all(isinstance(item, str) for item in found):
        raise ConfigError(where, key, f"is {value!r}, expected a pattern or a list of patterns")
    return tuple(item.lower().removeprefix(".") for item in found)


def check_modalities(modalities: tuple[PackedModality, ...], *, where: object, key: str) -> tuple[PackedModality, ...]:
    """Checks that the modalities of a plan can stand together in one packed file.

    Raises:
        ConfigError: there are none or too many, two share a name or its hash, or two are the metadata, rest or listing.
    """
    if not 1 <= len(modalities) <= MAX_MODALITIES:
        raise ConfigError(where, key, f"has {len(modalities)} packed modalities, expected 1 to {MAX_MODALITIES}")
    hashes: dict[int, str] = {}
    takes: dict[str, str] = {}
    for number, modality in enumerate(modalities):
        try:
            hashed = name_hash(modality.name)
        except UnicodeEncodeError as error:
            raise ConfigError(where, f"{key}[{number}].name", f"is {modality.name!r}, which is no UTF-8") from error
        if hashed in hashes:
            other = hashes[hashed]
            detail = f"is {modality.name!r}, " + (
                "which is there twice" if other == modality.name else f"whose CRC-32 is that of {other!r}"
            )
            raise ConfigError(where, f"{key}[{number}].name", detail)
        hashes[hashed] = modality.name
        take = modality.selector.take
        if take in ("metadata", "rest", "listing") and takes.setdefault(take, modality.name) != modality.name:
            raise ConfigError(where, f"{key}[{number}].take", f"{take} is already taken by {takes[take]!r}")
    return modalities
