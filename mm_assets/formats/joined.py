"""Several files of the same samples read as one: a packed file, and an MSTR file for each modality added to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import SchemaMismatchError
from mm_assets.formats.batch import Chunk, Column, Indices
from mm_assets.formats.byte_source import MappedFile
from mm_assets.formats.reader import PackedReader, scan_files
from mm_assets.formats.records import ModalitySpec, Payload
from mm_assets.formats.report import VerifyReport
from mm_assets.formats.sample_ids import SampleIds
from mm_assets.formats.stored import StoredPayload

__all__ = ["JoinedReader"]

T = TypeVar("T")


class JoinedReader:
    """Reads a packed file together with its streams. Methods have the arguments and errors of `PackedReader`.

    An error names the file that is damaged. It pickles like its readers.

    Args:
        packed: the packed file. It and the streams are closed with this reader.
        streams: of each added modality its name and its file.

    Attributes:
        parts: the packed file, then the streams.
        names: of the modalities, those of the packed file first.
        modalities: the specification of each.

    Raises:
        SchemaMismatchError: a stream is not of the samples of the packed file, holds other modalities than the one
            it is named for, or has the name of another modality. The readers stay open.
    """

    raw_cache: ClassVar[None] = None  # each part has its own

    def __init__(self, packed: PackedReader, streams: Sequence[tuple[str, PackedReader]]) -> None:
        self.parts: tuple[PackedReader, ...] = (packed, *(stream for _, stream in streams))
        self._part_of = dict.fromkeys(packed.names, packed)
        for name, stream in streams:
            if stream.names != (name,) or stream.format != "MSTR":
                content = f"{stream.format} with {', '.join(stream.names)}"
                raise SchemaMismatchError(f"{stream.path}: found {content}, expected MSTR with {name} alone")
            if name in self._part_of:
                other = self._part_of[name].path
                raise SchemaMismatchError(f"{stream.path}: the modality {name!r} is already in {other}")
            if len(stream) != len(packed) or not stream.has_ids_of(packed):
                detail = f"has {len(stream)} samples, and {packed.path} has {len(packed)}"
                if len(stream) == len(packed):
                    detail = f"has other sample ids than {packed.path}, or another order of them"
                raise SchemaMismatchError(f"{stream.path}: {detail}. Add the stream to these samples again")
            self._part_of[name] = stream
        self.names = tuple(self._part_of)
        self.modalities: tuple[ModalitySpec, ...] = tuple(spec for part in self.parts for spec in part.modalities)
        self._splits: dict[tuple[str, ...], list[tuple[PackedReader, tuple[str, ...]]]] = {}

    @property
    def path(self) -> str:
        """Path or URL of the packed file."""
        return self.parts[0].path

    @property
    def format(self) -> str:
        """The format of the packed file."""
        return self.parts[0].format

    @property
    def schema(self) -> dict[str, object]:
        """The schema section of the packed file."""
        return self.parts[0].schema

    @property
    def sample_ids(self) -> SampleIds:
        """The samples' ids, in order."""
        return self.parts[0].sample_ids

    @property
    def mapped(self) -> MappedFile | None:
        """The mapping of a local packed file; None of any other."""
        return self.parts[0].mapped

    def __len__(self) -> int:
        return len(self.parts[0])

    def __repr__(self) -> str:
        return f"JoinedReader({', '.join(part.path for part in self.parts)})"

    # --- which file ---------------------------------------------------------------------------------------------------

    def part_of(self, name: str) -> PackedReader:
        """Returns the file that holds a modality; `KeyError` if none does."""
        try:
            return self._part_of[name]
        except KeyError:
            raise KeyError(f"{self.path}: no modality {name!r}; it has {', '.join(self.names)}") from None

    def split(self, names: Sequence[str] | None) -> Sequence[tuple[PackedReader, tuple[str, ...]]]:
        """Returns the files that hold modalities, each with its own ones; None stands for all modalities.

        For equal names it returns the same tuples again: `fast_path` recognizes the modalities of a batch by them.
        """
        key = self.names if names is None else tuple(names)
        split = self._splits.get(key)
        if split is None:
            names_by_part: dict[PackedReader, list[str]] = {} if key else {self.parts[0]: []}
            for name in key:
                names_by_part.setdefault(self.part_of(name), []).append(name)
            split = self._splits[key] = [(part, tuple(part_names)) for part, part_names in names_by_part.items()]
        return split

    def read_each(
        self, names: Sequence[str] | None, read: Callable[[PackedReader, tuple[str, ...]], dict[str, T]]
    ) -> dict[str, T]:
        """Calls `read` for each file that holds modalities, and merges the results in the order of `names`."""
        split = self.split(names)
        if len(split) == 1:
            return read(*split[0])
        results: dict[str, T] = {}
        for part, part_names in split:
            results.update(read(part, part_names))
        return {name: results[name] for name in (self.names if names is None else names)}

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_payload(self, i: int, name: str, *, verify: bool | None = None) -> Payload | None:
        """Returns one payload, or None if the modality is absent."""
        return self.part_of(name).read_payload(i, name, verify=verify)

    def read_sample(
        self, i: int, names: Sequence[str] | None = None, *, verify: bool | None = None
    ) -> dict[str, Payload | None]:
        """Returns the payloads of one sample by name."""
        return self.read_each(names, lambda part, own: part.read_sample(i, own, verify=verify))

    def read_columns(
        self,
        indices: Indices,
        names: Sequence[str] | None = None,
        *,
        verify: bool | None = None,
        in_parts: Collection[str] = (),
    ) -> dict[str, Column]:
        """Returns the payloads of many samples by name, records and data apart; one request to each file."""
        return self.read_each(
            names, lambda part, own: part.read_columns(indices, own, verify=verify, in_parts=in_parts)
        )

    def read_records(
        self, indices: Indices, names: Sequence[str] | None = None
    ) -> dict[str, tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]:
        """Returns which samples have each modality, and their metadata records."""
        return self.read_each(names, lambda part, own: part.read_records(indices, own))

    def read_columns_each(self, indices: Mapping[str, Indices], *, verify: bool | None = None) -> dict[str, Column]:
        """Returns the payloads of samples of each modality's own; one request to each file."""

        def read(part: PackedReader, own: tuple[str, ...]) -> dict[str, Column]:
            return part.read_columns_each({name: indices[name] for name in own}, verify=verify)

        return self.read_each(tuple(indices), read)

    def stored(self, indices: Indices, names: Sequence[str] | None = None) -> dict[str, list[StoredPayload | None]]:
        """Returns where the payloads of samples are, by name."""
        return self.read_each(names, lambda part, own: part.stored(indices, own))

    def scan(self, names: Sequence[str] | None = None, *, verify: bool | None = None) -> Iterator[Chunk]:
        """Yields all samples in order, in blocks of bounded size."""
        return scan_files(self.split(names), verify=verify)

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Returns which samples have a modality."""
        return self.part_of(name).presence(name)

    def sizes(self, name: str) -> npt.NDArray[np.uint32]:
        """Returns the bytes of record and data of every sample."""
        return self.part_of(name).sizes(name)

    def records(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns every metadata record of a modality."""
        return self.part_of(name).records(name)

    def checksums(self, name: str) -> npt.NDArray[np.uint32]:
        """Returns the CRC-32C of every payload of a modality."""
        return self.part_of(name).checksums(name)

    def verify(self) -> VerifyReport:
        """Reads all files and reports what is damaged; damage of a stream names its file."""
        first, *others = [part.verify() for part in self.parts]
        damage = list(first.damage)
        for report in others:
            damage += [replace(one, message=f"{report.path}: {one.message}") for one in report.damage]
        num_payloads = sum(report.num_payloads for report in (first, *others))
        return replace(first, num_payloads=num_payloads, damage=tuple(damage))

    # --- life time ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes all files."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
