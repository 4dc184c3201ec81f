"""The bytes of Standard MIDI Files: chunks and events to flat arrays of ticks; `media.midi` gives them seconds.

Every length is checked against the existing bytes. Any input gives an answer or a `MediaError` in linear time and
memory: about seven bytes per byte of the file, and about twenty per byte of notes, whose number is limited.

Why not a library: mido, which the tests compare with, takes quadratic time for a number that does not end (more than a
minute per megabyte), needs eighty times the file's size, refuses the chunks that the standard says to skip, gives
negative times in files that count SMPTE frames, and sums times in floating point. symusic gives float32 seconds,
refuses SMPTE frames, silently drops notes without an end, and turns a division of 0 into NaN.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = ["SMPTE_RATES", "Events", "Score", "Track", "read_tracks"]

MAX_BYTES = 2**28  # keeps the sum of all delta times (each below 2**28) in int64
MAX_TRACKS = 4096  # a track without notes still costs time, and 16 bits would allow 65,535 of them

SMPTE_RATES = {24: (24, 1), 25: (25, 1), 29: (30_000, 1001), 30: (30, 1)}  # frames per second as a ratio

_SUSTAIN = 64  # controller number
_MAX_DENOMINATOR_POWER = 7  # a 128th note; the standard has a byte for it

_META, _SYSEX, _SYSEX_MORE = 0xFF, 0xF0, 0xF7
_META_END, _META_TEMPO, _META_TIME_SIGNATURE = 0x2F, 0x51, 0x58
_NOTE_OFF, _NOTE_ON, _CONTROL, _PROGRAM, _CHANNEL_PRESSURE = 0x8, 0x9, 0xB, 0xC, 0xD


@dataclass(slots=True)
class Events:
    """Events of one kind, in the order of the file.

    Attributes:
        ticks: int64, not decreasing.
        keys: uint8, the channel; the numerator of a time signature; 0 for a tempo.
        values: int32: program 0..127; pedal 0..127; denominator; microseconds per quarter note.
    """

    ticks: array[int] = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    values: array[int] = field(default_factory=lambda: array("i"))

    def add(self, tick: int, key: int, value: int) -> None:
        """Append an event."""
        self.ticks.append(tick)
        self.keys.append(key)
        self.values.append(value)


@dataclass(slots=True)
class Track:
    """The events of one track, times in ticks from its start.

    Attributes:
        end: where it ends.
        onset: int64, where each note starts, in the order of the file.
        release: int64, where it ends.
        pitch: uint8, 0..127.
        velocity: uint8, 1..127.
        channel: uint8, 0..15.
        program: int16, the channel's when the note starts; -1 if the track has set none.
        tempos: microseconds per quarter note.
        signatures: numerator and denominator.
        programs: the channels' programs.
        pedals: the channels' sustain pedals.
    """

    end: int = 0
    onset: array[int] = field(default_factory=lambda: array("q"))
    release: array[int] = field(default_factory=lambda: array("q"))
    pitch: bytearray = field(default_factory=bytearray)
    velocity: bytearray = field(default_factory=bytearray)
    channel: bytearray = field(default_factory=bytearray)
    program: array[int] = field(default_factory=lambda: array("h"))
    tempos: Events = field(default_factory=Events)
    signatures: Events = field(default_factory=Events)
    programs: Events = field(default_factory=Events)
    pedals: Events = field(default_factory=Events)


@dataclass(frozen=True, slots=True)
class Score:
    """A file's header and tracks.

    Attributes:
        format: 0, 1 or 2.
        division: as in the file: below 0x8000 ticks per quarter note, at least 1; else SMPTE, a negated key of
            `SMPTE_RATES` in the upper byte and ticks per frame, at least 1, in the lower.
        tracks: as many as the header says.
    """

    format: int
    division: int
    tracks: list[Track]


def read_tracks(data: Buffer, *, max_bytes: int, max_notes: int) -> Score:
    """Read a Standard MIDI File of format 0, 1 or 2.

    A note starts at a note-on and ends at the first note-off (or note-on of velocity 0) of its pitch and channel in
    its track that does not end an earlier note; without one, at the track's end. Other note-offs are ignored. Chunks
    other than tracks are skipped, as is what follows the last track or a track's end-of-track event.

    Args:
        data: the file.
        max_bytes: of the file, at most 2**28.
        max_notes: of all tracks together.

    Raises:
        MediaError: not a MIDI file, a damaged one, or one past a limit.
    """
    if len(data) > min(max_bytes, MAX_BYTES):
        reason = f"is {len(data)} bytes long, expected at most {min(max_bytes, MAX_BYTES)} (max_bytes)"
        raise MediaError("<midi>", reason, setting="max_bytes")
    content = bytes(data)
    if content[:4] != b"MThd" or len(content) < 14:
        found = content[:4] if len(content) >= 4 else f"{len(content)} bytes"
        raise MediaError("<midi>", f"starts with {found!r}, expected a header chunk MThd of a Standard MIDI File")
    size, file_format, num_tracks, division = (
        int.from_bytes(content[at : at + width], "big") for at, width in ((4, 4), (8, 2), (10, 2), (12, 2))
    )
    if size < 6 or file_format > 2:
        raise MediaError("<midi>", f"has a header of {size} bytes and format {file_format}, expected 6 and 0, 1 or 2")
    if file_format == 0 and num_tracks != 1:
        raise MediaError("<midi>", f"has {num_tracks} tracks, expected 1 in a file of format 0")
    ticks = division & 0xFF if division & 0x8000 else division
    if not ticks or (division & 0x8000 and 256 - (division >> 8) not in SMPTE_RATES):
        raise MediaError("<midi>", f"has the division {division:#06x}, expected ticks per beat or an SMPTE frame rate")
    if num_tracks > MAX_TRACKS:
        raise MediaError("<midi>", f"has {num_tracks} tracks, expected at most {MAX_TRACKS}")
    tracks: list[Track] = []
    position = 8 + size
    notes_left = max_notes
    while len(tracks) < num_tracks:
        if position + 8 > len(content):
            raise MediaError("<midi>", f"ends after {len(tracks)} tracks, expected {num_tracks}")
        kind, size = content[position : position + 4], int.from_bytes(content[position + 4 : position + 8], "big")
        start, position = position + 8, position + 8 + size
        if position > len(content):
            raise MediaError(
                "<midi>", f"has a chunk of {size} bytes at {start}, expected at most {len(content) - start}"
            )
        if kind == b"MTrk":
            reader = _TrackReader(content, start, position, f"track {len(tracks)}")
            tracks.append(reader.read(notes_left))
            notes_left -= len(tracks[-1].onset)
    return Score(file_format, division, tracks)


class _TrackReader:
    """Reads the events of one track chunk, content[start:stop]."""

    def __init__(self, content: bytes, start: int, stop: int, track: str) -> None:
        self.content = content
        self.position = start
        self.stop = stop
        self.track = track

    def fail(self, found: str, expected: str) -> MediaError:
        return MediaError("<midi>", f"{self.track}, before byte {self.position}: found {found}, expected {expected}")

    def number(self) -> int:
        """A variable-length number, at most four bytes."""
        value = 0
        for position in range(self.position, min(self.position + 4, self.stop)):
            byte = self.content[position]
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                self.position = position + 1
                return value
        raise self.fail("a number without an end", "a variable-length number of at most four bytes")

    def piece(self) -> bytes:
        """Bytes that follow their number."""
        size = self.number()
        if size > self.stop - self.position:
            raise self.fail(f"an event of {size} bytes", f"at most {self.stop - self.position}, the rest of the track")
        self.position += size
        return self.content[self.position - size : self.position]

    def read(self, max_notes: int) -> Track:
        track = Track()
        content, stop = self.content, self.stop
        tick = 0
        status = 0  # the running status; 0 where there is none
        sounding: dict[int, deque[int]] = {}  # notes that have not ended, by channel and pitch, first in first out
        programs = [-1] * 16
        while self.position < stop:
            tick += self.number()
            if self.position >= stop:
                raise self.fail("a time without an event", "an event")
            byte = content[self.position]
            if byte >= 0xF0:
                self.position += 1
                if self._is_end(track, tick, byte):
                    break
                # System events cancel running status, but many files continue it after a meta event.
                status = status if byte == _META else 0
                continue
            if byte >= 0x80:
                status = byte
                self.position += 1
            elif not status:
                raise self.fail(f"a data byte {byte:#04x}", "an event's status")
            kind, channel = status >> 4, status & 0x0F
            size = 1 if kind in (_PROGRAM, _CHANNEL_PRESSURE) else 2
            values = content[self.position : min(self.position + size, stop)]
            if len(values) < size or max(values) > 0x7F:
                raise self.fail(f"event {status:#04x} with the bytes {values.hex() or 'none'}", f"{size} below 0x80")
            self.position += size
            if kind == _NOTE_ON and values[1]:
                if len(track.onset) >= max_notes:
                    reason = self.fail("another note", "no more (max_notes)").reason
                    raise MediaError("<midi>", reason, setting="max_notes")
                sounding.setdefault(channel << 7 | values[0], deque()).append(len(track.onset))
                track.onset.append(tick)
                track.release.append(-1)
                track.pitch.append(values[0])
                track.velocity.append(values[1])
                track.channel.append(channel)
                track.program.append(programs[channel])
            elif kind in (_NOTE_ON, _NOTE_OFF):
                waiting = sounding.get(channel << 7 | values[0])
                if waiting:
                    track.release[waiting.popleft()] = tick
            elif kind == _PROGRAM:
                programs[channel] = values[0]
                track.programs.add(tick, channel, values[0])
            elif kind == _CONTROL and values[0] == _SUSTAIN:
                track.pedals.add(tick, channel, values[1])
        for index in chain.from_iterable(sounding.values()):
            track.release[index] = tick
        track.end = tick
        return track

    def _is_end(self, track: Track, tick: int, byte: int) -> bool:
        """Read a system or meta event after its status; whether it is the end of the track."""
        if byte in (_SYSEX, _SYSEX_MORE):
            self.piece()
            return False
        if byte != _META:
            raise self.fail(f"status {byte:#04x}", "a channel, system-exclusive or meta event")
        if self.position >= self.stop:
            raise self.fail("a meta event without a type", "its type")
        kind = self.content[self.position]
        self.position += 1
        value = self.piece()
        if kind == _META_TEMPO:
            tempo = int.from_bytes(value, "big")
            if len(value) != 3 or not tempo:
                raise self.fail(f"a tempo of bytes {value[:8].hex() or 'none'}", "three, not all zero")
            track.tempos.add(tick, 0, tempo)
        elif kind == _META_TIME_SIGNATURE:
            if len(value) < 2 or not value[0] or value[1] > _MAX_DENOMINATOR_POWER:
                found = f"a time signature of bytes {value[:8].hex() or 'none'}"
                raise self.fail(found, f"a numerator from 1 and a power of two up to {_MAX_DENOMINATOR_POWER}")
            track.signatures.add(tick, value[0], 1 << value[1])
        return kind == _META_END
