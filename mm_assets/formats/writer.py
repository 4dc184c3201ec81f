"""What both writers share: checking what the caller gives, collecting ids, and finishing or giving up.

A refused sample (`EncodeError`) leaves no trace, and the writer continues. Any failure while bytes are being written
ends the writer, and the target stays as it was. A thread writes while the caller prepares the next samples: at most
16 MiB wait for it, and a later `write`, or `close`, raises its errors.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from mm_assets.errors import EncodeError
from mm_assets.formats.output import AtomicFile
from mm_assets.formats.records import (
    IDS_SECTION,
    MAX_MODALITIES,
    MAX_SAMPLES,
    SCHEMA_SECTION,
    Buffer,
    ModalitySpec,
    Payload,
    name_hash,
)
from mm_assets.formats.report import WriteSummary
from mm_assets.formats.sample_ids import find_duplicate
from mm_assets.formats.tail import TailWriter, dump_schema


def as_bytes(value: Buffer) -> Buffer:
    """`value` as a buffer whose length is its bytes; `TypeError` where it is not a C-contiguous buffer."""
    if isinstance(value, bytes):
        return value
    view = memoryview(value)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else b""


def check_modalities(path: object, specs: Sequence[ModalitySpec]) -> None:
    """Refuses modalities that one file cannot hold together.

    Raises:
        EncodeError: none, more than 32, or two of one name or one name hash.
    """
    if not 1 <= len(specs) <= MAX_MODALITIES:
        raise EncodeError(f"{path}: {len(specs)} modalities, expected 1..{MAX_MODALITIES}")
    by_hash: dict[int, str] = {}
    for spec in specs:
        other = by_hash.get(name_hash(spec.name))
        if other == spec.name:
            raise EncodeError(f"{path}: two modalities are named {spec.name!r}")
        if other is not None:
            raise EncodeError(
                f"{path}: the names {other!r} and {spec.name!r} have the same CRC-32 "
                f"{name_hash(spec.name):#010x}, by which files tell modalities apart: rename one"
            )
        by_hash[name_hash(spec.name)] = spec.name


def checked_payload(spec: ModalitySpec, payload: Payload) -> Payload:
    """The payload as buffers whose lengths are their bytes.

    Raises:
        EncodeError: no contiguous bytes, or a record of the wrong size.
    """
    if type(payload.metadata) is bytes and type(payload.data) is bytes and len(payload.metadata) == spec.metadata_size:
        return payload  # nearly always
    try:
        metadata, data = as_bytes(payload.metadata), as_bytes(payload.data)
    except TypeError as error:
        raise EncodeError(f"modality {spec.name!r}: not contiguous bytes ({error})") from error
    if len(metadata) != spec.metadata_size:
        found = f"the metadata record has {len(metadata)} bytes"
        raise EncodeError(f"modality {spec.name!r}: {found}, expected {spec.metadata_size}")
    return Payload(metadata, data)


class PackedWriter(ABC):
    """Writes one packed file; see `MultWriter` and `MstrWriter`.

    Args:
        path: the target; replaced when the writer closes.
        modalities: 1 to 32; their order is the file's.
        num_samples: how many samples will come, if that is known; it must hold, and only saves a copy.
        provenance: JSON in the schema: where the samples come from. Nothing of the moment or the machine belongs
            in it, so that the same samples give the same bytes.
        fsync: wait for the disk before the file takes its place.

    Attributes:
        num_samples: samples written so far.

    Raises:
        EncodeError: modalities or provenance cannot be written.
        BlockingIOError: another writer is at work on the same target.
    """

    format: ClassVar[str]

    def __init__(
        self,
        path: str | os.PathLike[str],
        modalities: Sequence[ModalitySpec],
        *,
        num_samples: int | None = None,
        provenance: Mapping[str, object] | None = None,
        fsync: bool = True,
    ) -> None:
        self.path = Path(path)
        self.modalities = tuple(modalities)
        self._provenance = dict(provenance or {})
        self._announced = num_samples
        self._fsync = fsync
        check_modalities(self.path, self.modalities)
        if num_samples is not None and not 0 <= num_samples <= MAX_SAMPLES:
            raise EncodeError(f"{self.path}: num_samples is {num_samples}, expected 0..{MAX_SAMPLES}")
        # Refused now rather than after all samples.
        dump_schema(self.format, self.modalities, [0] * len(self.modalities), self._provenance)
        self._numbers = {spec.name: number for number, spec in enumerate(self.modalities)}
        self._num_present = [0] * len(self.modalities)
        self.num_samples = 0
        self._id_offsets = array("Q", [0])
        self._id_blob = bytearray()
        self._summary: WriteSummary | None = None
        self._ended = False
        self._target = AtomicFile(self.path)
        try:
            self._begin()
        except BaseException as error:
            self._fail(error)
            raise

    @abstractmethod
    def _begin(self) -> None:
        """Prepares the body."""

    @abstractmethod
    def _check_size(self, payloads: Sequence[Payload | None]) -> None:
        """Refuses, with `EncodeError`, what the format's fields cannot count."""

    @abstractmethod
    def _append(self, payloads: Sequence[Payload | None]) -> None:
        """Writes one checked sample: one payload or None per modality."""

    @abstractmethod
    def _finish_body(self) -> None:
        """Assembles the body, and puts the file's position after it."""

    @abstractmethod
    def _finish_head(self, tail: TailWriter) -> None:
        """Writes what the head needs to know of the tail."""

    def _add_sections(self, tail: TailWriter) -> None:
        """Adds the sections that only this format has."""
        return

    def _table_checksums(self) -> Sequence[int] | None:
        """CRC-32C of each metadata table, or None in a format without them."""
        return None

    def write(self, sample_id: str, payloads: Mapping[str, Payload | None]) -> None:
        """Appends one sample.

        Args:
            sample_id: unique in the file; that is checked when the writer closes.
            payloads: by modality name; a missing name and None both mean absent.

        Raises:
            EncodeError: an unknown name, a record of the wrong size, an id that is not UTF-8, or a limit passed. The
                writer continues as if the call had not been made.
            OSError: the disk did not take this sample or one of those before it; the writer is closed.
            ValueError: the writer is closed, or this is a forked copy of it.
        """
        self._check_open()
        limit = MAX_SAMPLES if self._announced is None else self._announced
        if self.num_samples >= limit:
            what = "a file holds at most" if self._announced is None else "num_samples announced"
            raise EncodeError(f"{self._where(sample_id)}: {what} {limit} samples")
        try:
            key = sample_id.encode()
        except UnicodeEncodeError as error:
            detail = f"the id cannot be written as UTF-8 ({error.reason})"
            raise EncodeError(f"{self._where(sample_id)}: {detail}") from error
        checked: list[Payload | None] = [None] * len(self.modalities)
        for name, payload in payloads.items():
            number = self._numbers.get(name)
            if number is None:
                known = ", ".join(self._numbers)
                raise EncodeError(f"{self._where(sample_id)}: no modality {name!r} in this file; it has {known}")
            if payload is not None:
                try:
                    checked[number] = checked_payload(self.modalities[number], payload)
                except EncodeError as error:
                    raise EncodeError(f"{self._where(sample_id)}, {error}") from error.__cause__
        try:
            self._check_size(checked)
        except EncodeError as error:
            raise EncodeError(f"{self._where(sample_id)}: {error}") from None
        try:
            self._append(checked)
        except BaseException as error:
            self._fail(error)  # the body is incomplete
            raise
        for number, payload in enumerate(checked):
            self._num_present[number] += payload is not None
        self._id_blob += key
        self._id_offsets.append(len(self._id_blob))
        self.num_samples += 1

    @property
    def num_present(self) -> dict[str, int]:
        """How many samples so far have each modality."""
        return dict(zip(self._numbers, self._num_present, strict=True))

    @property
    def provenance(self) -> Mapping[str, object]:
        """Where the samples come from, as it is written."""
        return self._provenance

    @property
    def ids(self) -> tuple[Buffer, Buffer]:
        """The section of the ids: where each ends, and their bytes."""
        return memoryview(self._id_offsets).cast("B"), self._id_blob

    def _where(self, sample_id: str) -> str:
        return f"{self.path}, sample {self.num_samples} ({sample_id!r})"

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError(f"the writer of {self.path} is closed")
        if self._target.is_forked():
            raise ValueError(f"the writer of {self.path} was begun in another process, which alone can continue it")

    def add_provenance(self, key: str, value: object) -> None:
        """Adds to the provenance what is known only while the samples are written.

        Args:
            key: its name; an earlier value of the same name is replaced.
            value: JSON.

        Raises:
            EncodeError: the value is not JSON; the provenance stays as it was.
            ValueError: the writer is closed.
        """
        self._check_open()
        provenance = {**self._provenance, key: value}
        dump_schema(self.format, self.modalities, self._num_present, provenance)
        self._provenance = provenance

    def close(self) -> WriteSummary:
        """Finishes the file and puts it at its target; a second call returns the same summary.

        Raises:
            EncodeError: fewer samples than announced, or two samples share an id; the target is untouched.
            OSError: the disk did not take all of it; the target is untouched.
            ValueError: the writer was aborted, or this is a forked copy of it.
        """
        if self._summary is not None:
            return self._summary
        self._check_open()
        try:
            self._check_complete()
            self._finish_body()
            tail = TailWriter(self._target.file)
            tail.add(IDS_SECTION, *self.ids)
            self._add_sections(tail)
            facts = self._num_present, self._provenance, self._table_checksums()
            tail.add(SCHEMA_SECTION, dump_schema(self.format, self.modalities, *facts))
            self._finish_head(tail)
            size = self._target.commit(fsync=self._fsync)
        except BaseException as error:
            self._fail(error)
            raise
        self._ended = True
        self._summary = WriteSummary(
            path=self.path, num_samples=self.num_samples, num_bytes=size, num_present=self.num_present
        )
        return self._summary

    def _check_complete(self) -> None:
        if self._announced is not None and self.num_samples != self._announced:
            raise EncodeError(f"{self.path}: {self.num_samples} samples came, {self._announced} were announced")
        pair = find_duplicate(np.frombuffer(self._id_offsets, np.uint64), self._id_blob)
        if pair is not None:
            start, end = self._id_offsets[pair[0]], self._id_offsets[pair[0] + 1]
            sample_id = self._id_blob[start:end].decode()
            raise EncodeError(f"{self.path}: samples {pair[0]} and {pair[1]} share the id {sample_id!r}")

    def _fail(self, error: BaseException) -> None:
        self.abort()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.path)  # calls that take a descriptor do not know it

    def abort(self) -> None:
        """Gives up: removes what was written, and leaves the target as it was. Fine at any time, and twice.

        A forked copy of a writer only closes it there.
        """
        if not self._ended:
            self._ended = True
            self._target.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended:
            self.close()
