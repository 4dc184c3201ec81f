"""The pack plan: which rows go to which packed modality, and by which field.

A plan is decided once for a dataset and stored as JSON. A row goes to the first packed modality, in the plan's order,
whose selector takes it and whose field accepts its content. A row that no modality takes goes to the `rest` of a plan
that has one, and is dropped with a reason otherwise. A composite field is made of several rows, its parts, each with a
selector of its own. A field may also get a value of the sample's JSON, or of a column of its metadata row, which takes
no row. Nothing here reads content.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mm_assets.errors import ConfigError, SchemaMismatchError, meant
from mm_assets.fields import BytesField, Field, SequenceField, field_from_declaration
from mm_assets.formats import ModalitySpec, name_hash
from mm_assets.formats.records import MAX_MODALITIES
from mm_assets.sources.member import NUMBERED, role_matches, split_member_name

__all__ = [
    "NUMBERED",
    "ROW_TAKES",
    "VALUE_TAKES",
    "PackPlan",
    "PackedModality",
    "RowName",
    "Selector",
    "Take",
    "declared_fields",
    "declared_imports",
    "judged_part",
    "parse_fields",
    "row_name",
]

Take = Literal["one", "sequence", "shared", "parts", "json", "column", "metadata", "rest", "listing"]
OnRefused = Literal["drop", "absent"]
VALUE_TAKES = ("json", "column")  # of a selector of a value, which takes no row
ROW_TAKES = ("one", "sequence", "shared")  # of a selector that finds content rows by their names

RowName = tuple[str, str, str]
"""What selectors know of a content row: modality, and role and extension of its member's name."""


def row_name(modality: str, member: str | None, roles: Sequence[str] | None) -> RowName:
    """What selectors know of the row of a member; a row without one has neither role nor extension.

    Args:
        modality: row modality.
        member: the member's name.
        roles: the setting `samples.roles`.
    """
    _, role, extension = split_member_name(member, roles) if member else ("", "", "")
    return modality, role, extension


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which rows a packed modality takes.

    Attributes:
        modality: row modality; "*" is any.
        role: pattern (``*``, ``?``, ``[abc]``) for the part of the member's name between key and extension; "" means
            no role and "#" a whole number.
        extension: patterns for the member's extension. For `take` "one" their order is an order of preference.
        take: "one" content row of a sample, the first by preference and position; a "sequence" of all of them at their
            positions; as a part of a composite, one row that is "shared", since another modality takes it; several
            "parts", each by a selector of its own; a value of the sample's "json" at `key`, or of the "column" `key`
            of its metadata row, which takes no row; the sample's "metadata"; the "rest" that no other takes, numbered
            as the sample's content rows are; or a "listing" of where each content row went.
        key: for `take` "json", path of keys into the sample's JSON, where () is the whole; for "column", its name.
        on_refused: for these two, what a value that the field refuses costs: "drop" the sample, or the value alone,
            which is then "absent" and counted.
    """

    modality: str = "*"
    role: str = "*"
    extension: tuple[str, ...] = ("*",)
    take: Take = "one"
    key: tuple[str, ...] = ()
    on_refused: OnRefused = "drop"

    def rank(self, modality: str, role: str, extension: str) -> int | None:
        """Place of a content row's extension in the order of preference, or None where the row is not taken."""
        if self.take not in ROW_TAKES or self.modality not in ("*", modality):
            return None
        if not role_matches(role, self.role):
            return None
        for rank, pattern in enumerate(self.extension):
            if fnmatch.fnmatchcase(extension, pattern):
                return rank
        return None

    def value_in(self, content: Any) -> Any:
        """The value of a sample's parsed JSON at `key`; None if it has nothing, or null, there."""
        for name in self.key:
            content = content.get(name) if isinstance(content, dict) else None
        return content

    def to_json(self) -> dict[str, Any]:
        """The selector as plans store it."""
        if self.take in VALUE_TAKES:
            return {"take": self.take, "key": list(self.key), "on_refused": self.on_refused}
        return {"modality": self.modality, "role": self.role, "extension": list(self.extension), "take": self.take}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModality:
    """A named field of every packed sample, and the rows that fill it.

    Attributes:
        name: unique in the plan.
        field_type: class name of the field; of the user's own also its import path, ``module:Class``.
        config: the field's configuration as declared, with its defaults.
        selector: the rows.
        parts: for `take` "parts": the rows of each part of the field, by its name in `Field.PARTS`. Their `take` is
            "one" or "shared", "sequence" where the part may have many contents, or "json".
    """

    name: str
    field_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    selector: Selector = field(default_factory=Selector)
    parts: Mapping[str, Selector] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, value: Field, selector: Selector | None = None, *, parts: Mapping[str, Selector] | None = None
    ) -> PackedModality:
        """The modality that a field object fills, by one selector or by those of its parts."""
        if parts is not None:
            selector = Selector(take="parts")
        return cls(
            name=name,
            field_type=type(value).__name__,
            config=value.config,
            selector=selector or Selector(),
            parts=parts or {},
        )

    @property
    def selectors(self) -> dict[str, Selector]:
        """Part name to selector; the one of a field without parts is named ""."""
        return dict(self.parts) if self.selector.take == "parts" else {"": self.selector}

    @property
    def reads_json(self) -> bool:
        """Whether a value out of the sample's JSON is needed."""
        return any(selector.take == "json" for selector in self.selectors.values())

    def field(self) -> Field:
        """The field object."""
        return field_from_declaration(self.field_type, self.config)

    def to_json(self) -> dict[str, Any]:
        """The modality as plans store it."""
        stored = {"name": self.name, "field": self.field_type, "config": dict(self.config)}
        if self.selector.take == "parts":
            return {**stored, "parts": {name: selector.to_json() for name, selector in self.parts.items()}}
        return {**stored, **self.selector.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """The dataset's decision about packing, made at registration; every partition follows it.

    Attributes:
        preset: the preset that it came from, "" where fields alone were given.
        modalities: the packed modalities, in the order of the packed files.
        roles: the setting `samples.roles`, by which names of members are split.
    """

    preset: str
    modalities: tuple[PackedModality, ...]
    roles: tuple[str, ...] | None = None

    def fields(self) -> dict[str, Field]:
        """Name to field, in the order of the packed files."""
        return {modality.name: modality.field() for modality in self.modalities}

    def specs(self) -> tuple[ModalitySpec, ...]:
        """The fields as containers store them."""
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

    def unplaced(self, rows: Sequence[RowName]) -> list[int]:
        """Numbers of the content rows of one sample that no modality takes, by their names; none where it has a rest.

        A field may refuse the content of a row that is taken; that is not known here.
        """
        if self.special("rest") is not None:
            return []
        left = dict(enumerate(rows))
        for modality in self.modalities:
            taken: set[int] = set()
            for selector in modality.selectors.values():
                ranks = {number: selector.rank(*row) for number, row in left.items() if number not in taken}
                found = sorted((rank, number) for number, rank in ranks.items() if rank is not None)
                if selector.take != "shared":
                    taken.update(number for _, number in (found[:1] if selector.take == "one" else found))
            left = {number: row for number, row in left.items() if number not in taken}
        return list(left)

    def special(self, take: Take) -> int | None:
        """Number of the modality that is the plan's metadata, rest or listing, or None where it has none."""
        return next((n for n, m in enumerate(self.modalities) if m.selector.take == take), None)

    def to_json(self) -> dict[str, Any]:
        """The plan as `schema.json` stores it; `from_json` reads it back."""
        roles = {} if self.roles is None else {"roles": list(self.roles)}
        return {"preset": self.preset, "modalities": [modality.to_json() for modality in self.modalities], **roles}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str, declared: object = None) -> PackPlan:
        """Reads a stored plan, which may name the user's own fields only as far as the declaration does.

        Args:
            value: what `to_json` gave.
            where: the file, for errors.
            declared: the declaration's ``pack``; of other import paths in `value` nothing is imported.

        Raises:
            SchemaMismatchError: `value` is not a plan, or names a field that is not known here or not declared.
        """
        try:
            undeclared = _import_paths(value["modalities"]) - declared_imports(declared)
            if undeclared:
                detail = f"found the field {min(undeclared)!r}, which pack.fields of the declaration does not name"
                raise SchemaMismatchError(
                    f"{where}: {detail}: declare it, or decide again with `mm-assets register --new-schema`"
                )
            modalities = parse_fields(value["modalities"], where=where, key="pack.modalities")
            if not isinstance(value["preset"], str):
                raise TypeError(f"preset is {value['preset']!r}")
            roles = value.get("roles")
            if roles is not None and not (isinstance(roles, list) and all(isinstance(role, str) for role in roles)):
                raise TypeError(f"roles is {roles!r}")
            return cls(
                preset=value["preset"],
                modalities=check_modalities(modalities, where=where, key="pack.modalities"),
                roles=None if roles is None else tuple(roles),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise SchemaMismatchError(f"{where}: not a pack plan: {error}") from error


def declared_fields(pack: object) -> set[str]:
    """The fields that the ``pack`` of a declaration names: class names, and import paths ``module:Class``."""
    return _field_names(pack.get("fields") if isinstance(pack, Mapping) else None)


def declared_imports(pack: object) -> set[str]:
    """The import paths among `declared_fields`, which name the user's own."""
    return {name for name in declared_fields(pack) if ":" in name}


def _import_paths(fields: object) -> set[str]:
    return {name for name in _field_names(fields) if ":" in name}


def _field_names(fields: object) -> set[str]:
    """The classes in a list of fields: each field's own, and those of fields in its settings."""
    named: list[object] = []
    for item in fields if isinstance(fields, Sequence) else ():
        if isinstance(item, Mapping):
            config = item.get("config")
            inner = config.values() if isinstance(config, Mapping) else ()
            named += [item.get("field"), *(value.get("type") for value in inner if isinstance(value, Mapping))]
    return {name for name in named if isinstance(name, str)}


def judged_part(fields: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fields, of a declaration or of a plan's JSON, that decide which rows can be packed.

    Left out are those without which no row would be kept or dropped: the listing, and values of columns that may be
    absent.
    """
    neutral = ("column", "absent"), ("listing", None)
    return [dict(field) for field in fields if (field.get("take"), field.get("on_refused")) not in neutral]


_SELECTOR_KEYS = ("modality", "role", "extension", "take", "key", "on_refused")
_KEYS = ("name", "field", "config", *_SELECTOR_KEYS, "parts")


def parse_fields(value: object, *, where: object, key: str) -> tuple[PackedModality, ...]:
    """Reads a list of packed modalities, as declarations and stored plans have it.

    Each is a mapping with ``name``, ``field`` (a class name, or the import path ``module:Class`` of the user's own),
    and optionally ``config`` and either ``modality``, ``role``, ``extension`` (a pattern or a list of them), ``take``
    and ``key``, or ``parts``: for each part of the field a mapping of the same five. With ``take: sequence`` the field
    may be that of an item.

    Raises:
        ConfigError: a key or value is not allowed; the message says what is.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(where, key, f"is {value!r}, expected a list of fields")
    return tuple(_parse_field(item, where, f"{key}[{number}]") for number, item in enumerate(value))


def _parse_field(value: object, where: object, key: str) -> PackedModality:
    value = _known_keys(value, _KEYS, where, key)
    name = _text(value, "name", None, where, key)
    type_name = _text(value, "field", None, where, key)
    try:
        made = field_from_declaration(type_name, value.get("config"))
    except ConfigError as error:
        where_in = "field" if error.key == "field" else f"config.{error.key}"
        raise ConfigError(where, f"{key}.{where_in}", error.detail) from error
    config = made.declared_config(value.get("config") or {})
    if "parts" in value:
        for other in _SELECTOR_KEYS:
            if other in value:
                raise ConfigError(where, f"{key}.{other}", "is set beside parts: give it to each part instead")
        modality = PackedModality.of(name, made, parts=_parse_parts(value["parts"], made, where, f"{key}.parts"))
        return replace(modality, field_type=type_name, config=config)
    default: Take = "json" if "key" in value else "one" if made.item_field is None else "sequence"
    selector = _parse_selector(value, default, where, key)
    if selector.take in ("parts", "shared"):
        why = "which the key parts says" if selector.take == "parts" else "which only a part of a field may be"
        raise ConfigError(where, f"{key}.take", f"is {selector.take!r}, {why}")
    if selector.take == "sequence" and made.item_field is None:
        made, config = SequenceField(made), {"inner": {"type": type_name, "config": config}}
        type_name = type(made).__name__
    _check_field(made, selector.take, where, f"{key}.field")
    return replace(PackedModality.of(name, made, selector), field_type=type_name, config=config)


def _known_keys(value: object, allowed: tuple[str, ...], where: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, key, f"is {value!r}, expected keys and values: {', '.join(allowed)}")
    for name in value:
        if name not in allowed:
            detail = f"is not a key of a packed field; allowed: {', '.join(allowed)}{meant(name, allowed)}"
            raise ConfigError(where, f"{key}.{name}", detail)
    return value


def _parse_parts(value: object, made: Field, where: object, key: str) -> dict[str, Selector]:
    if not made.PARTS:
        raise ConfigError(where, key, f"are given, and {type(made).__name__} is made of one content")
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(where, key, f"is {value!r}, expected part names with their rows: {', '.join(made.PARTS)}")
    parts = {}
    for name, item in value.items():
        if name not in made.PARTS:
            detail = f"is not a part of {type(made).__name__}; allowed: {', '.join(made.PARTS)}"
            raise ConfigError(where, f"{key}.{name}", detail)
        item = _known_keys(item, _SELECTOR_KEYS, where, f"{key}.{name}")
        many = made.PARTS[name].many
        default: Take = "json" if "key" in item else "sequence" if many else "one"
        selector = _parse_selector(item, default, where, f"{key}.{name}")
        takes = ("sequence", "json") if many else ("one", "shared", "json")
        if selector.take not in takes:
            allowed = " or ".join(takes)
            raise ConfigError(where, f"{key}.{name}.take", f"is {selector.take!r}, allowed: {allowed}")
        parts[name] = selector
    for name, part in made.PARTS.items():
        if part.needed and name not in parts:
            raise ConfigError(where, f"{key}.{name}", f"is missing, and {type(made).__name__} needs it")
    return {name: parts[name] for name in made.PARTS if name in parts}


def _parse_selector(value: Mapping[str, Any], default: Take, where: object, key: str) -> Selector:
    take = value.get("take", default)
    if take not in get_args(Take):
        raise ConfigError(where, f"{key}.take", f"is {take!r}, allowed: {', '.join(get_args(Take))}")
    for name in ("key", "on_refused"):
        if name in value and take not in VALUE_TAKES:
            detail = f"is about a value, and take is {take!r}, not {' or '.join(VALUE_TAKES)}"
            raise ConfigError(where, f"{key}.{name}", detail)
    on_refused = value.get("on_refused", "drop")
    if on_refused not in get_args(OnRefused):
        allowed = ", ".join(get_args(OnRefused))
        raise ConfigError(where, f"{key}.on_refused", f"is {on_refused!r}, allowed: {allowed}")
    if take in VALUE_TAKES:
        for name in ("modality", "role", "extension"):
            if name in value:
                raise ConfigError(where, f"{key}.{name}", f"names rows, and take: {take} takes none")
    patterns = _texts(value.get("extension", "*"), "a pattern or a list of patterns", where, f"{key}.extension")
    keys = "a key of the sample's JSON or a list of them, outermost first"
    path = _texts(value.get("key", ()), keys, where, f"{key}.key", empty=True)
    if take == "column" and len(path) != 1:
        raise ConfigError(where, f"{key}.key", f"is {list(path)!r}, expected the name of one column")
    return Selector(
        modality=_text(value, "modality", "*", where, key),
        role=_text(value, "role", "*", where, key, empty=True),
        extension=tuple(pattern.lower().removeprefix(".") for pattern in patterns),
        take=take,
        key=path,
        on_refused=on_refused,
    )


def _texts(value: object, expected: str, where: object, key: str, *, empty: bool = False) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not (found or empty) or not all(isinstance(item, str) for item in found):
        raise ConfigError(where, key, f"is {value!r}, expected {expected}")
    return tuple(found)


def _check_field(made: Field, take: Take, where: object, key: str) -> None:
    item = made.item_field or made
    if take in ROW_TAKES and not item.TAKES_CONTENT:
        detail = f"is {type(item).__name__}, which is made of parts: {', '.join(item.PARTS)}; say which rows they are"
        raise ConfigError(where, key.removesuffix("field") + "parts", detail)
    fits, expected = {
        "one": (made.item_field is None, "a field other than SequenceField, or take: sequence"),
        "metadata": (made.HOLDS_JSON, "JSONField"),
        "listing": (made.HOLDS_JSON, "JSONField"),
        "rest": (made == SequenceField(BytesField()), "SequenceField of BytesField"),
        "sequence": (made.item_field is not None, "SequenceField"),
        "json": (not item.PARTS and item.TAKES_JSON, "a field of JSON values; a composite takes them by parts"),
        "column": (not item.PARTS and item.TAKES_JSON, "a field of JSON values"),
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


def _is_taken(shared: Selector, modalities: tuple[PackedModality, ...]) -> bool:
    """Whether some modality takes a row that a shared selector finds; assumed where patterns leave it open."""
    selectors = [selector for modality in modalities for selector in modality.selectors.values()]
    if any(selector.take == "rest" for selector in selectors) or set("*?[#") & {*shared.role, *shared.modality}:
        return True
    extensions = [pattern.replace("*", "") for pattern in shared.extension]
    return any(
        selector.take != "shared" and selector.rank(shared.modality, shared.role, extension) is not None
        for selector in selectors
        for extension in extensions
    )


def check_modalities(modalities: tuple[PackedModality, ...], *, where: object, key: str) -> tuple[PackedModality, ...]:
    """Checks that the modalities of a plan fit in one packed file.

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
            raise ConfigError(where, f"{key}[{number}].name", f"is {modality.name!r}, which is not UTF-8") from error
        if hashed in hashes:
            other = hashes[hashed]
            detail = f"is {modality.name!r}, " + (
                "which is there twice" if other == modality.name else f"whose CRC-32 is that of {other!r}"
            )
            raise ConfigError(where, f"{key}[{number}].name", detail)
        hashes[hashed] = modality.name
        for part, selector in modality.parts.items():
            if selector.take == "shared" and not _is_taken(selector, modalities):
                detail = "is a row that no packed modality takes: give it one of its own, or take: one"
                raise ConfigError(where, f"{key}[{number}].parts.{part}", detail)
        take = modality.selector.take
        if take in ("metadata", "rest", "listing") and takes.setdefault(take, modality.name) != modality.name:
            raise ConfigError(where, f"{key}[{number}].take", f"{take} is already taken by {takes[take]!r}")
    return modalities
