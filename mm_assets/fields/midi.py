"""Music as notes: Standard MIDI Files stored as they are. Decoding gives their notes with times in seconds.

`mm_assets.media.midi` reads the file and computes times; this module only stores it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mm_assets.errors import MediaError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import Encoded, Field, corrupt, unreadable
from mm_assets.fields.facts import Fact, Spans
from mm_assets.media.content_types import Buffer
from mm_assets.media.midi import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_DURATION_SECONDS,
    DEFAULT_MAX_NOTES,
    MAX_DURATION_SECONDS,
    MIDIFile,
    NoteTable,
    parse_midi,
)
from mm_assets.media.smf import MAX_BYTES
from mm_assets.summaries import ArrayValue

__all__ = ["MIDI", "MIDIField", "NoteTable"]

# A file of format 0, its one track without an event.
_SILENCE = b"MThd\0\0\0\x06\0\0\0\x01\x01\xe0MTrk\0\0\0\x04\0\xff\x2f\0"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MIDI(ArrayValue):
    """Music, decoded.

    Attributes:
        data: the Standard MIDI File, byte for byte.
        notes: its notes, times in seconds from the start of the file.
        duration_seconds: where the last track ends.
    """

    data: bytes
    notes: NoteTable
    duration_seconds: float


@dataclass(frozen=True, kw_only=True)
class MIDIField(Field):
    """A piece of music as a Standard MIDI File of format 0, 1 or 2.

    Value: the file's bytes, or a `MIDI`, of which the bytes are stored (its notes must be theirs). Decodes to `MIDI`.
    The bytes are read once while encoding, so that what is stored is known to decode. Notes alone are refused: seconds
    do not determine the ticks and tempos that they came from.

    Attributes:
        sustain: let the sustain pedal hold notes beyond their release, as `MIDIFile.notes` says.
        max_bytes: size of a file at most.
        max_notes: notes of a file at most.
        max_duration_seconds: length of a file at most; no more than `MAX_DURATION_SECONDS`.
    """

    TYPE_ID: ClassVar[int] = 41
    SHOWN_TYPE: ClassVar[str] = "audio/midi"
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [
            ("num_notes", "<u4"),
            ("num_tracks", "<u2"),
            ("division", "<u2"),
            ("format", "u1"),
            ("_pad", "u1", (7,)),
            ("duration_us", "<u8"),
            ("last_note_end_us", "<u8"),
        ]
    )
    keeps_bytes: ClassVar[bool] = True
    TAKES_JSON: ClassVar[bool] = False
    FACTS: ClassVar[tuple[type[Fact], ...]] = (Spans,)
    LIMITS: ClassVar[tuple[str, ...]] = ("max_bytes", "max_notes", "max_duration_seconds")

    sustain: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES
    max_notes: int = DEFAULT_MAX_NOTES
    max_duration_seconds: int = DEFAULT_MAX_DURATION_SECONDS

    def __post_init__(self) -> None:
        self._expect_bool("sustain")
        self._expect_int("max_bytes", 1, MAX_BYTES)
        self._expect_int("max_notes", 1, 2**32 - 1)
        self._expect_int("max_duration_seconds", 1, MAX_DURATION_SECONDS)

    @property
    def empty_value(self) -> MIDI:
        """Music without notes."""
        return self.decode(*self.encode(_SILENCE))

    def encode(self, value: MIDI | Buffer) -> Encoded:
        """Encode a file's bytes, or a `MIDI`."""
        if isinstance(value, MIDI) and isinstance(value.data, bytes) and isinstance(value.notes, NoteTable):
            data = value.data
        elif isinstance(value, Buffer):
            data = bytes(value)
        else:
            raise self._wrong_value(value, "a Standard MIDI File's bytes, or MIDI")
        try:
            file = self._parse(data)
        except MediaError as error:
            raise self._unreadable(error, "bytes that are not a MIDI file", "a Standard MIDI File") from error
        if isinstance(value, MIDI):
            notes = file.notes(sustain=self.sustain)
            if (value.notes, value.duration_seconds) != (notes, file.duration_seconds):
                found = f"MIDI with {len(value.notes)} notes that are not its data's"
                raise self._wrong_content(found, f"the {len(notes)} notes that its data decodes to")
        return Encoded(self._pack_record(*_facts(file)), data)

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> MIDI:
        """Return `MIDI`; nothing in it is a view of the payload."""
        expected = self._unpack_record(metadata)
        content = bytes(as_bytes_view(data))
        try:
            file = self._parse(content)
        except MediaError as error:
            raise unreadable(error, "music cannot be read: ") from error
        if (found := _facts(file)) != expected:
            raise corrupt("music is not as its record says", found=found, expected=expected)
        return MIDI(content, file.notes(sustain=self.sustain), file.duration_seconds)

    def decode_window(self, metadata: Buffer | np.void, data: Buffer, start_seconds: float, seconds: float) -> MIDI:
        """Return `MIDI` with the notes that sound in a window, whole, with onsets from the window's start.

        The onset of a note that began before is negative. `data` and `duration_seconds` are those of the whole file.
        """
        music = self.decode(metadata, data)
        onsets, ends = music.notes.onset_seconds, music.notes.end_seconds
        notes = music.notes.select(
            (onsets < start_seconds + seconds) & ((ends > start_seconds) | (onsets >= start_seconds))
        )
        moved = dataclasses.replace(notes, onset_seconds=notes.onset_seconds - start_seconds)
        return MIDI(music.data, moved, music.duration_seconds)

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[Spans]:
        """The notes."""
        notes = self.decode(metadata, data).notes
        yield Spans("note", notes.onset_seconds, notes.end_seconds)

    def _parse(self, data: bytes) -> MIDIFile:
        return parse_midi(
            data,
            max_bytes=self.max_bytes,
            max_notes=self.max_notes,
            max_duration_seconds=self.max_duration_seconds,
        )


def _facts(file: MIDIFile) -> tuple[Any, ...]:
    """The record's values, the same whatever the field's settings; times to the nearest microsecond."""
    ends = file.notes().end_seconds
    last_end = float(ends.max()) if len(ends) else 0.0
    duration, last = round(file.duration_seconds * 1_000_000), round(last_end * 1_000_000)
    return file.num_notes, file.num_tracks, file.division, file.format, duration, last
