"""Which field decodes which modality of a dataset, by its schema or by the caller's arguments.

The schema comes from a file, so nothing in it is trusted: a modality whose field is not known here, or would read
other records than are stored, is not decoded, and the error says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mm_assets.dataset.files import Reader
from mm_assets.dataset.open_files import OpenFiles
from mm_assets.errors import ConfigError, MissingExtraError, SchemaMismatchError
from mm_assets.fields import FIELD_TYPES, ArraySpec, Field, field_from_config, unregistered
from mm_assets.fields.base import StoredPart
from mm_assets.fields.parts import Path, as_text, part_names, split_name, take
from mm_assets.formats import ModalitySpec
from mm_assets.summaries import describe

__all__ = ["DatasetFields", "NamedPart"]


class NamedPart(NamedTuple):
    """What a name such as ``document.layout.words`` stands for.

    Attributes:
        name: as it was given.
        modality: that the part is of.
        stored: how the payload that is read is found within the modality's, each within the one before; () if it is the
            modality's.
        field: decodes that payload.
        path: the keys that lead from what it decodes to to the part.
    """

    name: str
    modality: str
    stored: tuple[StoredPart, ...]
    field: Field
    path: Path

    @property
    def payload(self) -> tuple[str | int, ...]:
        """The modality and the names of the payloads within one another: parts with the same ones are read together."""
        return self.modality, *(one.payload for one in self.stored)

    @property
    def is_array(self) -> bool:
        """Whether a batch is an array, or arrays, of the field's `value_layout`."""
        layout = self.field.value_layout
        if not self.path:
            return layout is not None
        return isinstance(layout, Mapping) and len(self.path) == 1 and self.path[0] in layout

    @property
    def layout(self) -> ArraySpec | Mapping[str, ArraySpec] | None:
        """Shape and dtype of each value, as `Field.value_layout`."""
        layout = self.field.value_layout if self.is_array else None
        return layout[str(self.path[0])] if self.path and isinstance(layout, Mapping) else layout

    @property
    def empty_value(self) -> Any:
        """As `Field.empty_value`."""
        try:
            return take(self.field.empty_value, self.path)
        except LookupError:
            return None


_NOT_REGISTERED = "the field {0!r} is not registered: pass --field module:Class to the command, or call register_field"


class DatasetFields:
    """The modalities of a dataset and their fields; read from the first file when they are first needed.

    Args:
        files: of the dataset.
        given: fields in place of those of the schema, by name.
        only: the modalities to show, in their order; None: all, in the file's order.
    """

    def __init__(self, files: OpenFiles, *, given: Mapping[str, Field], only: Sequence[str] | None = None) -> None:
        self.given = dict(given)
        self.only = None if only is None else tuple(only)
        self._files = files
        self._path = files.name
        self._stored: tuple[str, ...] | None = None  # the names in the file
        self._chosen: tuple[str, ...] | None = None  # the names that were chosen last
        self._fields: dict[str, Field] = {}
        self._unreadable: dict[str, str] = {}
        self._parts: dict[str, NamedPart] = {}
        self._record_sizes: dict[str, int] = {}

    def set_up(self) -> None:
        """Read the fields of the first file, if any; `SchemaMismatchError` if a given field does not fit it."""
        if self._stored is None and len(self._files):
            reader = self._files[0]
            for spec in reader.modalities:
                self._set_up(reader, spec)
            for name in self.given:
                if name not in reader.names:
                    raise SchemaMismatchError(f"{reader.path}: no modality {name!r}; it has {', '.join(reader.names)}")
            self._stored = reader.names

    def _set_up(self, reader: Reader, spec: ModalitySpec) -> None:
        self._record_sizes[spec.name] = spec.metadata_size
        given = self.given.get(spec.name)
        name = spec.type_name or getattr(FIELD_TYPES.get(spec.type_id), "__name__", f"type id {spec.type_id:#06x}")
        stored: Field | None = None
        try:
            stored = field_from_config(name, spec.config, trusted=False)
        except (ConfigError, MissingExtraError) as error:
            own = unregistered(name, spec.config)
            self._unreadable[spec.name] = str(error) if own is None else _NOT_REGISTERED.format(own)
        field = given or stored
        if field is None:
            return
        found = (spec.type_id, spec.metadata_size)
        expected = (field.TYPE_ID, field.metadata_type.itemsize)
        if found != expected:
            detail = (
                f"modality {spec.name!r} has type id and record size {found}, {type(field).__name__} has {expected}"
            )
            if given is not None:
                raise SchemaMismatchError(f"{reader.path}: {detail}")
            self._unreadable[spec.name] = detail
            return
        if stored is not None and field.metadata_type != stored.metadata_type:
            detail = f"found records {stored.metadata_type}, the given {name} reads {field.metadata_type}"
            raise SchemaMismatchError(f"{reader.path}: modality {spec.name!r}: {detail}")
        self._fields[spec.name] = field

    @property
    def names(self) -> tuple[str, ...]:
        """The modalities, in order."""
        self.set_up()
        return (self._stored or ()) if self.only is None else self.only

    @property
    def known(self) -> dict[str, Field]:
        """Modality name to field; without those that cannot be decoded here."""
        names = self.names
        if self.only is None:
            return dict(self._fields)
        return {name: self._fields[name] for name in names if name in self._fields}

    def check_name(self, name: str) -> None:
        """Refuse, with `KeyError`, a name that is not a modality."""
        names = self.names
        if name not in names:
            raise KeyError(f"{self._path}: no modality {name!r}; it has {', '.join(names) or 'none'}")

    def choose(self, modalities: Sequence[str] | None) -> tuple[str, ...]:
        """The names to read: all for None; each once.

        Raises:
            KeyError: one is not a modality.
            TypeError: one name where several are wanted.
        """
        if modalities is None:
            return self.names
        if isinstance(modalities, str):  # each of its letters would be taken for a name
            raise TypeError(f"modalities: found {modalities!r}, expected a list of names")
        last, given = self._chosen, tuple(modalities)
        if last is not None and given == last:
            return last  # batch after batch; the same object, by which readers know it
        names = self.names
        chosen = tuple(dict.fromkeys(given))
        for name in chosen:
            if name not in names:
                self.check_name(name)
        self._chosen = chosen
        return chosen

    def split(self, modalities: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[NamedPart, ...]]:
        """The modalities to decode, and the parts of modalities; errors as `choose` and `part`."""
        if modalities is None or isinstance(modalities, str) or set(modalities) <= set(self.names):
            names = self.choose(modalities)
            for name in names:
                self.field(name)
            return names, ()
        found = [self.part(name) for name in dict.fromkeys(modalities)]
        whole = tuple(part.name for part in found if part.name == part.modality)
        return whole, tuple(part for part in found if part.name != part.modality)

    def part(self, name: str) -> NamedPart:
        """What a name of a modality or of a part stands for.

        Raises:
            KeyError: no such modality, or its values have no such part.
            SchemaMismatchError: the modality cannot be decoded here.
        """
        part = self._parts.get(name)
        if part is None:
            split = split_name(name, self.names)
            if split is None:
                self.check_name(name)
            part = self._parts[name] = self._find_part(name, *(split or (name, ())))
        return part

    def _find_part(self, name: str, modality: str, path: Path) -> NamedPart:
        field, rest, owner = self.field(modality), path, modality
        stored: list[StoredPart] = []
        while rest and (found := field.stored_part(rest)) is not None:
            stored.append(found)
            if len(found.path) == len(rest):  # a layout is read as a document that has nothing else
                break
            owner += as_text(rest[: len(rest) - len(found.path)])
            field, rest = found.field, found.path
        if rest:
            self._check_part(name, owner, field, rest[0])
        return NamedPart(name, modality, tuple(stored), stored[-1].field if stored else field, rest)

    def _check_part(self, name: str, owner: str, field: Field, key: str | int) -> None:
        """Refuse, with `KeyError`, a part that no value of a field has."""
        kind, layout = field.VALUE_TYPE, field.value_layout
        if field.item_field is not None:
            names = "items, by number: [0]"
        elif kind is not None and (isinstance(key, int) or key.startswith("_") or not hasattr(kind, key)):
            names = part_names(kind)
        else:
            return
        if not (isinstance(layout, Mapping) and key in layout):
            raise KeyError(f"{self._path}: {name!r}: {owner!r} has no part {key!r}; it has {names}")

    def field(self, name: str) -> Field:
        """The field of a known modality; `SchemaMismatchError` if it cannot be decoded here, with the reason."""
        field = self._fields.get(name)
        if field is None:
            detail = f"modality {name!r} cannot be decoded here ({self._unreadable[name]}); its bytes can: read_raw"
            raise SchemaMismatchError(f"{self._path}: {detail}")
        return field

    def record_size(self, name: str) -> int:
        """Bytes of a modality's metadata record, also where it cannot be decoded; the caller has checked the name."""
        return self._record_sizes[name]

    def changed(self, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Field]:
        """The given fields, and those with changed settings; arguments and errors as `Dataset.with_settings`."""
        fields = dict(self.given)
        for name, changes in settings.items():
            self.check_name(name)
            fields[name] = _change_settings(self.field(name), changes, where=self._path, key=name)
        return fields


def _change_settings(field: Field, settings: Mapping[str, Any], *, where: str, key: str) -> Field:
    """The same field with some settings changed.

    Args:
        field: any; not changed itself.
        settings: values by name, as the field's configuration has them. Where a setting is itself a field, such as
            ``inner`` of a sequence, a mapping of that field's settings.
        where: the dataset, for messages.
        key: the modality, for messages.

    Raises:
        ConfigError: an unknown setting, a wrong value, or one that makes it a field of other payloads.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(where, key, f"found {describe(settings)}, expected a mapping of settings")
    plain: dict[str, Any] = {}
    fields: dict[str, Field] = {}
    for name, value in settings.items():
        current = getattr(field, name, None) if isinstance(name, str) else None
        if isinstance(current, Field):
            fields[name] = _change_settings(current, value, where=where, key=f"{key}.{name}")
        else:
            plain[name] = value
    try:
        changed = type(field).from_config({**field.config, **plain}) if plain else field
        changed = dataclasses.replace(changed, **fields)
    except ConfigError as error:
        raise ConfigError(where, f"{key}.{error.key}", error.detail) from error
    if changed.metadata_type != field.metadata_type:
        detail = (
            f"found {', '.join(map(str, settings))}: {type(field).__name__} would read another record than is there"
        )
        raise ConfigError(where, key, detail)
    before, after = (getattr(one, "tokenizer", None) for one in (field, changed))
    if before is not None and after is not None and before.sha256 != after.sha256:
        found = f"found {after.name} ({after.sha256[:8]}…)"
        raise ConfigError(
            where, f"{key}.tokenizer", f"{found}; the ids stored are of {before.name} ({before.sha256[:8]}…)"
        )
    return changed
