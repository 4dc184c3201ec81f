"""Presets: pack plans for the usual kinds of sample, and the choice between them.

`interleaved`, `image_text` and `speech` are fixed. `generic` is discovered from rows: one packed modality for each row
modality and role seen, so that no row of the dataset is lost, whatever it is; rows that a later shard brings beyond
that, and content that its field cannot read, go to `rest`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from mm_assets.errors import ConfigError
from mm_assets.etl.pack_plan import (
    MAX_MODALITIES,
    NUMBERED,
    PackedModality,
    PackPlan,
    Selector,
    Take,
    check_modalities,
    parse_fields,
)
from mm_assets.etl.source_ref import with_parsed_source_ref_columns
from mm_assets.etl.tar_index import split_member_name
from mm_assets.fields import (
    AudioField,
    BytesField,
    Field,
    ImageField,
    JSONField,
    NDArrayField,
    SequenceField,
    TextField,
)
from mm_assets.formats import name_hash

__all__ = ["PRESETS", "check_pack_config", "choose_plan"]

MAX_GROUPS = MAX_MODALITIES - 3  # of `generic`, beside `rest`, `rows` and `metadata`
MAX_NAME = 64  # characters of a name that is made from a role

# Names by the extension alone: at registration nothing has been materialized yet.
IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/webp", "image/tiff", "image/gif", "image/bmp"})
AUDIO_TYPES = frozenset({"audio/wav", "audio/flac", "audio/ogg", "audio/mpeg"})
ARRAY_TYPES = frozenset({"application/x-npy"})

_METADATA = PackedModality.of("metadata", JSONField(), Selector(modality="metadata", take="metadata"))
_REST = PackedModality.of("rest", SequenceField(BytesField()), Selector(take="rest"))
_ROWS = PackedModality.of("rows", JSONField(), Selector(take="listing"))
_TEXT = PackedModality.of("text", TextField(), Selector(modality="text", extension=("txt", "caption", "*")))

_FIXED: Mapping[str, tuple[PackedModality, ...]] = {
    "interleaved": (
        PackedModality.of("text", SequenceField(TextField()), Selector(modality="text", take="sequence")),
        PackedModality.of("image", SequenceField(ImageField()), Selector(modality="image", take="sequence")),
        _METADATA,
    ),
    "image_text": (PackedModality.of("image", ImageField(), Selector(modality="image")), _TEXT, _METADATA),
    "speech": (PackedModality.of("audio", AudioField(), Selector(modality="audio")), _TEXT, _METADATA),
}

PRESETS: tuple[str, ...] = (*_FIXED, "generic")
"""Names that ``pack`` may have in a declaration."""


def check_pack_config(pack: str | Mapping[str, Any] | None, *, where: object) -> None:
    """Checks the ``pack`` of a declaration as far as that is possible without rows.

    Raises:
        ConfigError: an unknown preset or key, a wrong value, or packed modalities that exclude each other.
    """
    preset, fields = _read_config(pack, where)
    if preset in _FIXED or (preset is None and isinstance(pack, Mapping)):
        _joined(preset, fields, _FIXED.get(preset or "", ()), where)


def choose_plan(rows: Iterable[pa.RecordBatch], *, pack: str | Mapping[str, Any] | None, where: object) -> PackPlan:
    """Decides how a dataset is packed.

    Args:
        rows: row batches of the first shard; samples contiguous, content not needed. Read only where the plan depends
            on them.
        pack: a preset; or a mapping with ``fields`` (see `parse_fields`) and optionally the ``preset`` that they add to
            or, by name, replace; or None, to choose the preset that loses none of `rows`.
        where: the file of the declaration, for messages.

    Raises:
        ConfigError: `pack` is wrong, or more fields are asked for than a packed file holds.
    """
    preset, fields = _read_config(pack, where)
    if pack is None:
        survey = _Survey(())
        survey.read(rows)
        preset = survey.preset()
        base = survey.generic() if preset == "generic" else _FIXED[preset]
    elif preset == "generic":
        survey = _Survey(fields)
        survey.read(rows)
        base = survey.generic()
    else:
        base = _FIXED.get(preset or "", ())
    return PackPlan(preset=preset or "", modalities=_joined(preset, fields, base, where))


def _read_config(pack: str | Mapping[str, Any] | None, where: object) -> tuple[str | None, tuple[PackedModality, ...]]:
    if pack is None:
        return None, ()
    if isinstance(pack, str):
        return _preset(pack, where, "pack"), ()
    if not isinstance(pack, Mapping):
        raise ConfigError(where, "pack", f"is {pack!r}, expected a preset ({', '.join(PRESETS)}) or keys and values")
    for key in pack:
        if key not in ("preset", "fields"):
            raise ConfigError(where, f"pack.{key}", "is not a key of pack; allowed: preset, fields")
    if not pack:
        raise ConfigError(where, "pack", "is empty, expected preset, fields or both")
    preset = _preset(pack["preset"], where, "pack.preset") if "preset" in pack else None
    fields = parse_fields(pack["fields"], where=where, key="pack.fields") if "fields" in pack else ()
    return preset, fields


def _preset(value: object, where: object, key: str) -> str:
    if not isinstance(value, str) or value not in PRESETS:
        raise ConfigError(where, key, f"is {value!r}, allowed: {', '.join(PRESETS)}")
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
    if preset is None and all(m.selector.take not in ("one", "sequence") for m in fields):
        raise ConfigError(where, "pack.fields", "take no content rows, expected at least one field that does")
    return check_modalities((*fields, *kept), where=where, key="pack.fields")


@dataclass(slots=True)
class _Group:
    """Content rows of one modality and role, counted."""

    modality: str
    role: str
    num_rows: int = 0
    num_samples: int = 0
    most: int = 0  # rows in one sample
    types: Counter[str | None] = field(default_factory=Counter)
    extensions: Counter[str] = field(default_factory=Counter)

    def made_field(self) -> Field:
        """The field that most of the rows' types call for; `rest` has the others."""
        inner = self._inner()
        return SequenceField(inner) if self.many else inner

    @property
    def many(self) -> bool:
        """Whether a sample may have several."""
        return self.most > 1 or self.role == NUMBERED

    def _inner(self) -> Field:
        if self.modality == "text":
            return TextField()
        known: dict[str, tuple[frozenset[str], Callable[[], Field]]] = {
            "image": (IMAGE_TYPES, ImageField),
            "audio": (AUDIO_TYPES, AudioField),
            "array": (ARRAY_TYPES, NDArrayField),
        }
        types, made = known.get(self.modality, (frozenset(), BytesField))
        fitting = sum(count for kind, count in self.types.items() if kind in types)
        return made() if 2 * fitting >= self.num_rows else BytesField()


class _Survey:
    """What kinds of row there are in each sample of a shard.

    Args:
        claimed: modalities whose rows are spoken for.
    """

    def __init__(self, claimed: tuple[PackedModality, ...]) -> None:
        self._claimed = claimed
        self.groups: dict[tuple[str, str], _Group] = {}
        self.interleaved = False
        self.most: Counter[str] = Counter()  # row modality -> most rows of it in a sample
        self.least: dict[str, int] = {}
        self._num_samples = 0
        self._sample: str | None = None
        self._json_member: str | None = None
        self._in_sample: Counter[tuple[str, str]] = Counter()

    def read(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Counts the rows of all batches."""
        for batch in rows:
            names = ["sample_id", "modality", "content_type", "source_ref"]
            table = with_parsed_source_ref_columns(pa.Table.from_batches([batch]).select(names))
            columns = [*names[:3], "_src_member", "_src_frame_index"]
            for row in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
                self._count(*row)
        self._end_sample()

    def _count(
        self, sample: str, modality: str, content_type: str | None, member: str | None, frame: int | None
    ) -> None:
        if sample != self._sample:
            self._end_sample()
            self._sample = sample
        if modality == "metadata":
            self._json_member = member
            return
        # Text out of the sample's JSON, and frames of one file: rows that have a place among each other.
        self.interleaved |= frame is not None or (
            modality == "text" and member is not None and member == self._json_member
        )
        _, role, extension = split_member_name(member) if member else ("", "", "")
        if any(m.selector.rank(modality, role, extension) is not None for m in self._claimed):
            return
        key = (modality, NUMBERED if role.isascii() and role.isdigit() else role)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(*key)
        group.num_rows += 1
        group.types[content_type] += 1
        group.extensions[extension] += 1
        self._in_sample[key] += 1

    def _end_sample(self) -> None:
        if self._sample is None:
            return
        by_modality: Counter[str] = Counter()
        for key, count in self._in_sample.items():
            group = self.groups[key]
            group.num_samples += 1
            group.most = max(group.most, count)
            by_modality[key[0]] += count
        for modality, count in by_modality.items():
            self.most[modality] = max(self.most[modality], count)
        for modality in ("text", "image", "audio"):
            self.least[modality] = min(self.least.get(modality, by_modality[modality]), by_modality[modality])
        self._in_sample.clear()
        self._json_member = None

    def preset(self) -> str:
        """The preset that fits every sample: each content row has a place in it."""
        modalities = set(self.most)
        plain = all(not role for _, role in self.groups)
        single = all(count == 1 for count in self.most.values())
        if self.interleaved and modalities <= {"text", "image"}:
            return "interleaved"
        if plain and single and modalities == {"text", "image"} and self.least["image"]:
            return "image_text"
        if plain and single and modalities == {"text", "audio"} and self.least["audio"]:
            group = self.groups["audio", ""]
            return "speech" if isinstance(group.made_field(), AudioField) else "generic"
        return "generic"

    def generic(self) -> tuple[PackedModality, ...]:
        """A packed modality for each of the most frequent groups, in a fixed order, then `rest`, `rows`, `metadata`."""
        room = MAX_MODALITIES - 3 - len(self._claimed)
        frequent = sorted(self.groups.values(), key=lambda g: (-g.num_rows, g.modality, g.role))[: max(room, 0)]
        reserved = {name_hash(name): name for name in ("rest", "rows", "metadata", *(m.name for m in self._claimed))}
        modalities = []
        for group in sorted(frequent, key=lambda g: (g.modality, g.role)):
            name = _free_name(group, reserved)
            role = group.role if group.role == NUMBERED else _literal(group.role)
            take: Take = "sequence" if group.many else "one"
            selector = Selector(modality=group.modality, role=role, take=take)
            modalities.append(PackedModality.of(name, group.made_field(), selector))
        return (*modalities, _REST, _ROWS, _METADATA)


def _literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _free_name(group: _Group, taken: dict[int, str]) -> str:
    """A name from the group's role, that no other modality has."""
    role = "" if group.role == NUMBERED else re.sub(r"[\x00-\x1f\x7f\s]+", "_", group.role)[:MAX_NAME]
    plain = role or group.modality
    longer = f"{group.modality}_{role}" if role else group.modality
    wishes = itertools.chain([plain, longer], (f"{longer}_{number}" for number in itertools.count(2)))
    name = next(wish for wish in wishes if name_hash(wish) not in taken)
    taken[name_hash(name)] = name
    return name
