"""Samples of datasets, tars and Parquet files as values for `mm_assets.create`, without a pipeline.

Each member becomes the value of a modality: that of its role, or else of its kind, as in `image`, `text`, `audio`,
`metadata`. The fields follow from the names of the first samples. Nothing is filtered or checked before it is written;
what cannot be read, or is not what its name says, raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from mm_assets.errors import ConfigError, SourceError
from mm_assets.fields import (
    AudioField,
    BytesField,
    Field,
    ImageField,
    JSONField,
    MIDIField,
    NDArrayField,
    SequenceField,
    SyncedVideoAudioField,
    TextField,
)
from mm_assets.formats.records import MAX_MODALITIES
from mm_assets.sources.arrow_rows import batch_payloads
from mm_assets.sources.base import SOURCES, open_container
from mm_assets.sources.compressed import decompress, is_compressed
from mm_assets.sources.member import MODALITY_OF_EXTENSION, Member
from mm_assets.sources.samples import is_metadata, shard_labels
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardKind, expand_shards
from mm_assets.storage.urls import normalized_url

__all__ = ["SourceSamples", "from_hf", "from_parquet", "from_webdataset"]

PROBED_SAMPLES = 256  # whose names determine the fields
MAX_BYTES = 2**32 - 1  # of a payload
BATCH_ROWS = 64
_FIELDS: Mapping[str, Callable[[], Field]] = {
    "image": ImageField,
    "audio": AudioField,
    "video": SyncedVideoAudioField,
    "text": TextField,
    "array": NDArrayField,
    "midi": MIDIField,
    "metadata": JSONField,
    "binary": BytesField,
}
_NO_NAME = re.compile(r"[\x00-\x1f\x7f\s./\\]+")

Locations = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Payloads = Iterator[tuple[str, Iterator[tuple[Member, bytes]]]]
"""What ids of samples start with, and the members of a file with their content."""


class SourceSamples:
    """Samples of a source, as ids and values by modality; they are read again each time they are iterated.

    Args:
        read: reads the source from its start.
        fields: the modalities that are wanted, with their fields; None for those of the first samples.

    Attributes:
        fields: by modality, for `mm_assets.create`.

    Raises:
        ConfigError: the first samples have no members, or more modalities than a file may have.
        SourceError: the source cannot be read.
    """

    def __init__(self, read: Callable[[], Payloads], fields: Mapping[str, Field] | None = None) -> None:
        self._read = read
        self.fields = dict(fields) if fields is not None else self._probed_fields()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields id and values of each sample, for `DatasetWriter.write`.

        Raises:
            SourceError: the source cannot be read, or a sample has several members for a field of one value.
        """
        for sample_id, members in self._samples():
            values: dict[str, Any] = {}
            for place, member, content in members:
                field = self.fields.get(place.modality)
                if field is None:
                    continue
                if field.item_field is not None:
                    items = values.setdefault(place.modality, [])
                    items.append((len(items) if place.position is None else place.position, content))
                elif place.modality in values:
                    detail = f"is the second member of its sample for {place.modality!r}, expected one: give "
                    detail += f"fields={{..., {place.modality!r}: SequenceField({type(field).__name__}())}}"
                    raise SourceError(member.shard, detail, member=member.member)
                else:
                    values[place.modality] = content
            for value in values.values():
                if isinstance(value, list):
                    value.sort(key=lambda item: item[0])
            yield sample_id, values

    def _samples(self) -> Iterator[tuple[str, list[tuple[_Place, Member, bytes]]]]:
        for prefix, payloads in self._read():
            for key, group in groupby(payloads, key=lambda found: found[0].sample_key):
                sample_id = key if not prefix or key.startswith(f"{prefix}/") else f"{prefix}/{key}"
                yield sample_id, [(_place(member), member, content) for member, content in group]

    def _probed_fields(self) -> dict[str, Field]:
        kinds: dict[str, str] = {}
        several: set[str] = set()
        for _, members in islice(self._samples(), PROBED_SAMPLES):
            present: set[str] = set()
            for place, _, _ in members:
                if kinds.setdefault(place.modality, place.kind) != place.kind:
                    kinds[place.modality] = "binary"
                if place.position is not None or place.modality in present:
                    several.add(place.modality)
                present.add(place.modality)
        if not 1 <= len(kinds) <= MAX_MODALITIES:
            detail = f"have {len(kinds)} modalities, expected 1 to {MAX_MODALITIES}: name those that you want"
            raise ConfigError("arguments", "fields", f"the first samples {detail}")
        fields = {name: _FIELDS[kind]() for name, kind in kinds.items()}
        return {name: SequenceField(field) if name in several else field for name, field in fields.items()}


class _Place(NamedTuple):
    """Where a member goes.

    Attributes:
        modality: its name.
        kind: of the field.
        position: among the items of the modality, if its name has a number.
    """

    modality: str
    kind: str
    position: int | None


def _place(member: Member) -> _Place:
    kind = "metadata" if is_metadata(member) else MODALITY_OF_EXTENSION.get(member.extension, "binary")
    role, _, number = member.role.rpartition(".")
    position = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else None
    if position is None:
        role = member.role
    name = kind
    if role:
        name = role
    elif kind == "text" and member.extension != "txt":
        name = member.extension
    return _Place(_NO_NAME.sub("_", name), kind, position)


def from_webdataset(
    urls: Locations, *, fields: Mapping[str, Field] | None = None, storage_options: Mapping[str, Any] | None = None
) -> SourceSamples:
    """Reads the samples of WebDataset shards.

    Args:
        urls: tars as paths or URLs, folders of them, or patterns such as ``{00000..00099}.tar``. The ids of several
            have the name of the tar before the key.
        fields: the modalities that are wanted, with their fields; None for those of the first samples.
        storage_options: arguments for the file system.

    Raises:
        ConfigError, SourceError: as for `SourceSamples`.
    """
    return _of_files(urls, "tar", fields, storage_options)


def from_parquet(
    paths: Locations, *, fields: Mapping[str, Field] | None = None, storage_options: Mapping[str, Any] | None = None
) -> SourceSamples:
    """Reads the samples of Parquet files that hold media, a row each; arguments and errors as `from_webdataset`."""
    return _of_files(paths, "parquet", fields, storage_options)


def _of_files(
    locations: Locations, name: str, fields: Mapping[str, Field] | None, options: Mapping[str, Any] | None
) -> SourceSamples:
    each = [locations] if isinstance(locations, str | os.PathLike) else locations
    kinds = [ShardKind(name, SOURCES[name].SUFFIXES)]
    urls: list[str] = []
    for location in [os.fspath(one) for one in each]:
        listing = expand_shards(normalized_url(location), options, kinds=kinds)
        if not listing.shards:
            raise SourceError(location, f"is not a {name} file, nor a folder or pattern of some")
        urls += [shard.url for shard in listing.shards]
    labels = shard_labels(urls) if len(urls) > 1 else {}

    def read() -> Payloads:
        for url in urls:
            with SourceFile(url, options) as file:
                yield labels.get(url, ""), _members(file)

    return SourceSamples(read, fields)


def _members(file: SourceFile) -> Iterator[tuple[Member, bytes]]:
    def wanted(member: Member) -> bool:
        reason = member.skip_reason or ""
        if reason.startswith(("no bytes", "no array")):
            raise SourceError(member.shard, reason, member=member.member)
        return not reason

    for member, content in open_container(file).payloads(wanted=wanted, max_bytes=MAX_BYTES):
        yield member, decompress(content, member.member, MAX_BYTES) if is_compressed(member.member) else content


def from_hf(dataset: Any, *, fields: Mapping[str, Field] | None = None) -> SourceSamples:
    """Reads the samples of a `datasets.Dataset` or `datasets.IterableDataset`: a row is one, as in a Parquet file.

    Media are not decoded. The ids are those in a text column `__key__`, else the split and the number of the row.

    Args:
        dataset: the dataset; also selected, shuffled or streamed.
        fields: the modalities that are wanted, with their fields; None for those of the first samples.

    Raises:
        ConfigError, SourceError: as for `SourceSamples`.
    """
    name = str(dataset.split or "rows")
    features = dataset.features

    def batches() -> Iterable[Any]:
        for table in dataset.with_format("arrow").iter(BATCH_ROWS):
            yield from table.to_batches()

    def read() -> Payloads:
        yield "", batch_payloads(name, None if features is None else features.arrow_schema, batches())

    return SourceSamples(read, fields)
