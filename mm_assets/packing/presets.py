"""Presets: pack plans for the usual kinds of sample, and the choice between them.

Most are fixed. `generic` and `robotics` are discovered from rows, one packed modality for each row modality and role;
`speech` finds where its word timings are, `document` whether its pages are those of PDFs. A preset with `rest` loses no
row of the dataset: rows of later shards that none of its modalities takes, and content that their fields cannot read,
go there. Columns of the metadata row are packed where the declaration names them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from mm_assets.errors import ConfigError, meant
from mm_assets.fields import (
    AudioField,
    BytesField,
    DocumentField,
    Field,
    ImageField,
    ImageTextPairField,
    JSONField,
    MIDIField,
    ScalarField,
    SequenceField,
    SyncedVideoAudioField,
    TextField,
    TimedTextField,
)
from mm_assets.formats.records import MAX_MODALITIES
from mm_assets.packing.kinds import SUBTITLES
from mm_assets.packing.plan import (
    VALUE_TAKES,
    PackedModality,
    PackPlan,
    Selector,
    check_modalities,
    parse_fields,
)
from mm_assets.packing.survey import TIMED_KEYS, Survey
from mm_assets.rows.schema import UserColumn

__all__ = ["ALL_COLUMNS", "PRESETS", "check_pack_config", "choose_plan", "chooses_preset", "plan_of", "survey_for"]


def _of(
    name: str, field: Field, modality: str, *extension: str, role: str = "*", sequence: bool = False
) -> PackedModality:
    selector = Selector(
        modality=modality, role=role, extension=extension or ("*",), take="sequence" if sequence else "one"
    )
    return PackedModality.of(name, field, selector)


_METADATA = PackedModality.of("metadata", JSONField(), Selector(modality="metadata", take="metadata"))
_REST = PackedModality.of("rest", SequenceField(BytesField()), Selector(take="rest"))
_ROWS = PackedModality.of("rows", JSONField(), Selector(take="listing"))
_EVERYTHING = (_REST, _ROWS, _METADATA)
_PLAIN_TEXT = ("txt", "caption", "*")
_TEXT = _of("text", TextField(), "text", *_PLAIN_TEXT)

_FIXED: Mapping[str, tuple[PackedModality, ...]] = {
    "interleaved": (
        _of("text", SequenceField(TextField()), "text", sequence=True),
        _of("image", SequenceField(ImageField()), "image", sequence=True),
        _METADATA,
    ),
    "image_text": (_of("image", ImageField(), "image"), _TEXT, _METADATA),
    "image_text_pair": (
        PackedModality.of(
            "pair",
            ImageTextPairField(image_size=(224, 224), encoding="jpeg"),
            parts={
                "image": Selector(modality="image"),
                "text": Selector(modality="text", extension=_PLAIN_TEXT),
                "clip_score": Selector(take="json", key=("clip_score",), on_refused="absent"),
            },
        ),
        _METADATA,
    ),
    "speech": (
        _of("audio", AudioField(), "audio"),
        _of("words", TimedTextField(), "text", *SUBTITLES),
        _TEXT,
        _METADATA,
    ),
    "video": (
        PackedModality.of(
            "clip",
            SyncedVideoAudioField(),
            parts={"video": Selector(modality="video"), "audio": Selector(modality="audio")},
        ),
        _of("subtitles", TimedTextField(), "text", *SUBTITLES),
        _of("text", TextField(), "text", "txt", "caption"),
        *_EVERYTHING,
    ),
    "document": (
        PackedModality.of(
            "document",
            DocumentField(),
            parts={"pages": Selector(modality="image", take="sequence"), "layout": Selector(take="json")},
        ),
        *_EVERYTHING,
    ),
    "music": (
        _of("audio", AudioField(), "audio"),
        _of("midi", MIDIField(), "midi"),
        _of("timed_lyrics", TimedTextField(), "text", *SUBTITLES),
        _of("lyrics", TextField(), "text", "txt", role="*lyrics*"),
        _of("text", TextField(), "text", "txt", "caption"),
        _of("score", SequenceField(ImageField()), "image", sequence=True),
        *_EVERYTHING,
    ),
}
_DISCOVERED = ("robotics", "generic")
_ASKS_ROWS = ("speech", "document", *_DISCOVERED)
# Of a PDF: in the place of the parts of `document`.
_PDF_PARTS: Mapping[str, Selector] = {
    "pages": Selector(modality="image", extension=("pdf",), take="sequence"),
    "layout": Selector(modality="text", extension=("pdf",)),
}

ALL_COLUMNS = "all"
# By the type of a column; of any other, JSON.
_COLUMN_FIELDS: Mapping[str, Field] = {
    "bool": ScalarField("bool"),
    "int64": ScalarField("int64"),
    "double": ScalarField("float64"),
    "string": TextField(),
}

PRESETS: tuple[str, ...] = (*_FIXED, *_DISCOVERED)
"""Names that ``pack`` may have in a declaration."""


def check_pack_config(pack: str | Mapping[str, Any] | None, *, where: object) -> None:
    """Checks the ``pack`` of a declaration as far as that is possible without rows.

    Raises:
        ConfigError: an unknown preset or key, a wrong value, or packed modalities that exclude each other.
    """
    preset, fields = _read_config(pack, where)
    if preset in _FIXED or not (preset or chooses_preset(pack)):
        _joined(preset, fields, _FIXED.get(preset or "", ()), where)


def chooses_preset(pack: str | Mapping[str, Any] | None) -> bool:
    """Whether the ``pack`` of a declaration leaves the preset to the samples: it is missing, or names columns only."""
    return pack is None or (isinstance(pack, Mapping) and pack.keys() == {"columns"})


def choose_plan(
    rows: Iterable[pa.RecordBatch],
    *,
    pack: str | Mapping[str, Any] | None,
    where: object,
    columns: Sequence[UserColumn] = (),
    roles: tuple[str, ...] | None = None,
) -> PackPlan:
    """Decides how a dataset is packed.

    Args:
        rows: row batches of some samples; each contiguous, content not needed. Read only where the plan depends
            on them.
        pack: a preset; or a mapping with ``fields`` (see `parse_fields`) and optionally the ``preset`` that they add to
            or, by name, replace, and the ``columns`` to pack; or None, to choose the preset that loses none of `rows`.
        where: the file of the declaration, for messages.
        columns: the columns that the filtered rows have beside the reserved ones.
        roles: the setting `samples.roles`.

    Raises:
        ConfigError: `pack` is wrong, has more fields than a packed file holds, or names a column that is not there,
            that is of items, or that has the name of another packed modality.
    """
    preset, fields = _read_config(pack, where)
    survey = Survey(fields, roles)
    if chooses_preset(pack) or preset in _ASKS_ROWS:
        survey.read(rows)
    return plan_of(survey, pack=pack, where=where, columns=columns)


def survey_for(pack: str | Mapping[str, Any] | None, *, where: object, roles: tuple[str, ...] | None = None) -> Survey:
    """A survey that leaves out the rows that a declaration's fields take; arguments and errors as `choose_plan`."""
    return Survey(_read_config(pack, where)[1], roles)


def plan_of(
    survey: Survey, *, pack: str | Mapping[str, Any] | None, where: object, columns: Sequence[UserColumn] = ()
) -> PackPlan:
    """As `choose_plan`, of rows that have been surveyed."""
    preset, fields = _read_config(pack, where)
    preset = survey.preset() if chooses_preset(pack) else preset
    _check_column_fields(fields, columns, where)
    chosen = _packed_columns(pack, fields, columns, where)
    if preset == "document" and survey.has_pages:
        fields = tuple(map(_of_pdf, fields))
    modalities = _joined(preset, fields, _base(preset, survey, len(chosen)), where)
    packed: list[PackedModality] = []
    names = {modality.name: modality for modality in modalities}
    for column, is_named in chosen:
        other, name = names.get(column.name), column.name
        if other is not None and (is_named or other in fields):
            detail = (
                f"the column {column.name!r} and the packed modality {other.name!r} ({other.field_type}, take: "
                f"{other.selector.take}) have one name: leave the column out, or pack it under another name with a "
                "field of `take: column`"
            )
            raise ConfigError(where, "pack.columns", detail)
        if other is not None and other.selector.take == "json" and other.selector.key == (column.source,):
            continue  # the preset packs this value
        while name in names:
            name += "_column"
        field = _COLUMN_FIELDS.get(column.type, JSONField())
        names[name] = PackedModality.of(name, field, Selector(take="column", key=(column.name,), on_refused="absent"))
        packed.append(names[name])
    if len(modalities) + len(packed) > MAX_MODALITIES:
        room = MAX_MODALITIES - len(modalities)
        detail = (
            f"gives {len(packed)} columns, and beside {len(modalities)} other packed modalities a file has room for "
            f"{room}: list those to pack; `metadata` and the tables have all of them"
        )
        raise ConfigError(where, "pack.columns", detail)
    if packed:
        modalities = check_modalities((*modalities, *packed), where=where, key="pack")
    return PackPlan(preset=preset or "", modalities=modalities, roles=survey.roles)


def _packed_columns(
    pack: str | Mapping[str, Any] | None,
    fields: tuple[PackedModality, ...],
    columns: Sequence[UserColumn],
    where: object,
) -> list[tuple[UserColumn, bool]]:
    """The columns that ``pack.columns`` selects, but for those that a field of that name packs; and which it names.

    Those that it only matches by a pattern may be packed under another name.
    """
    chosen: dict[str, bool] = {}
    for pattern in _patterns(pack, where):
        exact = [column for column in columns if column.name == pattern]  # a name may hold the characters of a pattern
        found = exact or [column for column in columns if fnmatch.fnmatchcase(column.name, pattern)]
        of_samples = [column for column in found if column.rows == "metadata"]
        if not of_samples and pattern != "*":
            raise ConfigError(where, "pack.columns", _no_column(pattern, columns))
        for column in of_samples:
            chosen[column.name] = bool(exact) or chosen.get(column.name, False)
    own = {m.name for m in fields if m.selector.take == "column" and m.selector.key == (m.name,)}
    # In their order, whatever that of the patterns.
    return [(c, chosen[c.name]) for c in columns if c.name in chosen and c.name not in own]


def _patterns(pack: str | Mapping[str, Any] | None, where: object) -> tuple[str, ...]:
    """The names and patterns of ``pack.columns``."""
    if not isinstance(pack, Mapping) or "columns" not in pack:
        return ()
    given = pack["columns"]
    if given == ALL_COLUMNS:
        return ("*",)
    if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) and name for name in given):
        detail = f"is {given!r}, expected a list of names or patterns of columns, or {ALL_COLUMNS}"
        raise ConfigError(where, "pack.columns", detail)
    return tuple(given)


def _check_column_fields(fields: tuple[PackedModality, ...], columns: Sequence[UserColumn], where: object) -> None:
    """Refuses a declared field of a column that is not there."""
    there = {column.name for column in columns if column.rows == "metadata"}
    for number, modality in enumerate(fields):
        if modality.selector.take == "column" and modality.selector.key[0] not in there:
            raise ConfigError(where, f"pack.fields[{number}].key", _no_column(modality.selector.key[0], columns))


def _no_column(pattern: str, columns: Sequence[UserColumn]) -> str:
    """Why a name or pattern gives no column of samples, with those that there are."""
    there = ", ".join(repr(column.name) for column in columns if column.rows == "metadata") or "none"
    of_items = [column for column in columns if fnmatch.fnmatchcase(column.name, pattern) or column.name == pattern]
    if of_items:
        names = ", ".join(f"{column.name!r} of {column.rows or 'any'} rows" for column in of_items)
        return f"{pattern!r} gives {names}: only columns of metadata rows can be packed, which are: {there}"
    return f"{pattern!r} gives no column, there are: {there}"


def _base(preset: str | None, survey: Survey, reserved: int) -> tuple[PackedModality, ...]:
    """The packed modalities of a preset; those that are discovered leave room for `reserved` others."""
    if preset == "generic":
        return (*survey.generic(reserved), *_EVERYTHING)
    if preset == "robotics":
        return (*survey.robotics(reserved), *_EVERYTHING)
    fixed = _FIXED.get(preset or "", ())
    if preset == "document" and survey.has_pages:
        return tuple(map(_of_pdf, fixed))
    timed = survey.json_key(TIMED_KEYS, "timed") if preset == "speech" else None
    if timed is None:
        return fixed
    selector = Selector(take="json", key=(timed,), on_refused="absent")
    words = PackedModality.of("words", TimedTextField(untimed="drop"), selector)
    return tuple(words if modality.name == "words" else modality for modality in fixed)


def _of_pdf(modality: PackedModality) -> PackedModality:
    """The modality `document` of the preset with the pages and the layout of a PDF, whatever its settings."""
    (preset, *_) = _FIXED["document"]
    return replace(modality, parts=_PDF_PARTS) if modality.parts == preset.parts else modality


def _read_config(pack: str | Mapping[str, Any] | None, where: object) -> tuple[str | None, tuple[PackedModality, ...]]:
    if pack is None:
        return None, ()
    if isinstance(pack, str):
        return _preset(pack, where, "pack"), ()
    if not isinstance(pack, Mapping):
        raise ConfigError(where, "pack", f"is {pack!r}, expected a preset ({', '.join(PRESETS)}) or keys and values")
    for key in pack:
        if key not in ("preset", "fields", "columns"):
            raise ConfigError(where, f"pack.{key}", "is not a key of pack; allowed: preset, fields, columns")
    if not pack:
        raise ConfigError(where, "pack", "is empty, expected at least one of preset, fields, columns")
    _patterns(pack, where)
    preset = _preset(pack["preset"], where, "pack.preset") if "preset" in pack else None
    if "fields" not in pack:
        return preset, ()
    fields = pack["fields"]
    if isinstance(fields, list):
        fields = [_inherited(item, _FIXED.get(preset or "", ())) for item in fields]
    return preset, parse_fields(fields, where=where, key="pack.fields")


def _inherited(item: Any, base: tuple[PackedModality, ...]) -> Any:
    """The preset's modality with other settings, where a declared field names one and selects no rows."""
    same = next((m for m in base if isinstance(item, Mapping) and m.name == item.get("name")), None)
    if same is None or item.get("field", same.field_type) != same.field_type or set(item) - {"name", "field", "config"}:
        return item
    stored = same.to_json()
    config = item.get("config")
    given = dict(config) if isinstance(config, Mapping) else {}
    return {**stored, "config": {**stored["config"], **given} if config is None or given else config}


def _preset(value: object, where: object, key: str) -> str:
    if not isinstance(value, str) or value not in PRESETS:
        raise ConfigError(where, key, f"is {value!r}, allowed: {', '.join(PRESETS)}{meant(value, PRESETS)}")
    return value


def _joined(
    preset: str | None, fields: tuple[PackedModality, ...], base: tuple[PackedModality, ...], where: object
) -> tuple[PackedModality, ...]:
    """The declared fields, which select first, then those of the preset that they do not replace, then the metadata."""
    names = {modality.name for modality in fields}
    takes = {modality.selector.take for modality in fields} & {"metadata", "rest", "listing"}
    kept = [m for m in base if m.name not in names and m.selector.take not in takes]
    if not any(m.selector.take == "metadata" for m in (*fields, *kept)):
        if "metadata" in names:
            raise ConfigError(
                where, "pack.fields", "'metadata' is the sample's JSON: give it take: metadata or another name"
            )
        kept.append(_METADATA)
    if preset is None and all(m.selector.take not in ("one", "sequence", "parts", *VALUE_TAKES) for m in fields):
        raise ConfigError(where, "pack.fields", "take no content rows, expected at least one field that does")
    return check_modalities((*fields, *kept), where=where, key="pack.fields")
