"""Notes, tempo and beats of a Standard MIDI File, with times in seconds.

Times are counted in integers and become float64 seconds by one division, so each is the nearest float64 to the exact
time. Any input gives an answer or a `MediaError`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.smf import SMPTE_RATES, Events, Score, Track, read_tracks
from mm_assets.summaries import ArrayValue

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MAX_DURATION_SECONDS",
    "DEFAULT_MAX_NOTES",
    "MAX_DURATION_SECONDS",
    "Beats",
    "MIDIFile",
    "NoteTable",
    "TempoMap",
    "parse_midi",
]

# With the finest division (32,767 ticks), times up to this are below 2**53 units, which float64 represents exactly.
MAX_DURATION_SECONDS = 259_200

DEFAULT_MAX_BYTES = 8 * 2**20  # a long symphony takes 1 MiB; larger files hold system-exclusive data, or are hostile
DEFAULT_MAX_NOTES = 1_000_000
DEFAULT_MAX_DURATION_SECONDS = 86_400
DEFAULT_MAX_BEATS = 1_000_000

_DEFAULT_TEMPO = 500_000  # microseconds per quarter note until the file sets a tempo: 120 per minute
_MICROSECONDS = 1_000_000
_PEDAL_DOWN = 64  # controller values from this on are "down"

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NoteTable(ArrayValue):
    """Notes in order of onset, then pitch, channel and track.

    Attributes:
        onset_seconds: (N,) float64, not decreasing.
        duration_seconds: (N,) float64, at least 0.
        pitch: (N,) uint8, 0..127, 60 is middle C.
        velocity: (N,) uint8, 1..127.
        channel: (N,) uint8, 0..15; 9 is percussion in General MIDI.
        program: (N,) uint8, 0..127, the channel's instrument when the note starts.
        track: (N,) uint16, from 0.
    """

    onset_seconds: npt.NDArray[np.float64]
    duration_seconds: npt.NDArray[np.float64]
    pitch: npt.NDArray[np.uint8]
    velocity: npt.NDArray[np.uint8]
    channel: npt.NDArray[np.uint8]
    program: npt.NDArray[np.uint8]
    track: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.onset_seconds)

    @property
    def end_seconds(self) -> npt.NDArray[np.float64]:
        """Where each note ends, (N,) float64."""
        return self.onset_seconds + self.duration_seconds

    def select(self, chosen: npt.NDArray[Any]) -> NoteTable:
        """The notes of a boolean mask or of indices."""
        return NoteTable(*(column[chosen] for column in self.columns()))

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays, in the order of the attributes."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, eq=False)
class TempoMap:
    """The tempo changes.

    Attributes:
        ticks: (n,) int64, increasing from 0.
        seconds: (n,) float64, the time of each change.
        microseconds_per_beat: (n,) int64, length of a quarter note from there on.
    """

    ticks: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    microseconds_per_beat: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Beats:
    """The beats up to the end of the last track.

    A beat is the time signature's unit: 6/8 has six. A change of signature starts a measure.

    Attributes:
        seconds: (B,) float64, increasing.
        number: (B,) int64, position in the measure, 1 is the downbeat.
        measure: (B,) int64, from 0.
    """

    seconds: npt.NDArray[np.float64]
    number: npt.NDArray[np.int64]
    measure: npt.NDArray[np.int64]


def _concatenated(parts: list[Any], dtype: str) -> npt.NDArray[Any]:
    """The concatenation of buffers of one type."""
    arrays = [np.frombuffer(part, dtype=dtype) for part in parts if len(part)]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


class _Timed:
    """Events of tracks that share a timeline, by tick, and at one tick in track order."""

    def __init__(self, parts: list[Events]) -> None:
        ticks = _concatenated([part.ticks for part in parts], "q")
        order = np.argsort(ticks, kind="stable")
        self.ticks: _Ints = ticks[order]
        self.keys: _Ints = _concatenated([part.keys for part in parts], "B")[order].astype(np.int64)
        self.values: _Ints = _concatenated([part.values for part in parts], "i")[order].astype(np.int64)

    def last_of_each_tick(self) -> npt.NDArray[np.bool_]:
        """(n,) bool: of several events at one tick, the last one applies."""
        return np.append(self.ticks[1:] != self.ticks[:-1], True)[: len(self.ticks)]


class _Clock:
    """Ticks to seconds, for tracks that share a timeline: a tick is a whole number of units.

    Attributes:
        per_second: units of a second.
        ticks: (n,) int64, where a tick's length changes; the first is 0.
        lengths: (n,) int64, units of a tick from there on.
        starts: (n,) int64, units up to there.
        end: tick where the last track ends.
        end_units: units up to there, below 2**53.
    """

    def __init__(self, division: int, tracks: list[Track], max_seconds: int) -> None:
        self.end = max((track.end for track in tracks), default=0)
        if division & 0x8000:  # a tick has one length, whatever the tempo
            numerator, denominator = SMPTE_RATES[256 - (division >> 8)]
            self.ticks, self.lengths = np.zeros(1, np.int64), np.full(1, denominator, np.int64)
            self.per_second = numerator * (division & 0xFF)
        else:
            tempos = _Timed([track.tempos for track in tracks])
            chosen = tempos.last_of_each_tick()
            self.ticks, self.lengths = tempos.ticks[chosen], tempos.values[chosen]
            if not len(self.ticks) or self.ticks[0] > 0:  # the default applies up to the first tempo
                self.ticks, self.lengths = np.insert(self.ticks, 0, 0), np.insert(self.lengths, 0, _DEFAULT_TEMPO)
            self.per_second = division * _MICROSECONDS
        spans = np.diff(self.ticks, append=self.end)
        # In floating point first: the product of hostile ticks and tempos does not fit an int64.
        seconds = float((spans.astype(np.float64) * self.lengths).sum()) / self.per_second
        if seconds <= max_seconds + 1:
            units = np.cumsum(spans * self.lengths)
            self.starts: _Ints = np.append(np.zeros(1, np.int64), units[:-1])
            self.end_units = int(units[-1])
        if seconds > max_seconds + 1 or self.end_units > max_seconds * self.per_second:
            reason = f"is {seconds:.6g} seconds long, expected at most {max_seconds} (max_duration_seconds)"
            raise MediaError("<midi>", reason, setting="max_duration_seconds")

    def units(self, ticks: _Ints) -> _Ints:
        """Units up to ticks from 0 to `end`."""
        index = np.searchsorted(self.ticks, ticks, side="right") - 1
        return np.asarray(self.starts[index] + (ticks - self.ticks[index]) * self.lengths[index], dtype=np.int64)

    def seconds(self, ticks: _Ints) -> npt.NDArray[np.float64]:
        """Seconds up to ticks from 0 to `end`."""
        return np.asarray(self.units(ticks) / self.per_second, dtype=np.float64)


class MIDIFile:
    """A Standard MIDI File, as `parse_midi` returns it.

    In formats 0 and 1 all tracks share one timeline: a tempo or time signature in any track applies to all; of several
    at one tick, the last in track order applies. In format 2 each track has its own timeline, and starts at 0.

    Attributes:
        format: 0, 1 or 2.
        num_tracks: tracks.
        division: as in the file: below 0x8000 ticks per quarter note; else SMPTE, the negated frames per second (24,
            25, 29 for 30000/1001, 30) in the upper byte and ticks per frame in the lower.
        num_notes: notes.
        duration_seconds: where the last track ends.
    """

    def __init__(self, score: Score, *, max_seconds: int) -> None:
        self.format = score.format
        self.num_tracks = len(score.tracks)
        self.division = score.division
        self.num_notes = sum(len(track.onset) for track in score.tracks)
        is_apart = score.format == 2 and score.tracks
        self._groups = [[track] for track in score.tracks] if is_apart else [score.tracks]  # each shares a timeline
        self._clocks = [_Clock(score.division, group, max_seconds) for group in self._groups]
        self.duration_seconds = max(clock.end_units / clock.per_second for clock in self._clocks)

    @property
    def ticks_per_beat(self) -> int | None:
        """Ticks per quarter note; None in a file that counts SMPTE frames."""
        return None if self.division & 0x8000 else self.division

    def notes(self, *, sustain: bool = False) -> NoteTable:
        """The notes with their times.

        A note's program is the last that its track has set for its channel; if it has set none, the last that any
        track has set by then; else 0.

        Args:
            sustain: a note that is released while its channel's sustain pedal is down ends when the pedal comes up,
                when its pitch starts again on its channel, or at the end of the tracks.
        """
        tables: list[NoteTable] = []
        first = 0
        for group, clock in zip(self._groups, self._clocks, strict=True):
            if not tables or any(track.onset for track in group):
                tables.append(_notes_of(group, clock, first, sustain=sustain))
            first += len(group)
        columns = zip(*(table.columns() for table in tables), strict=True)
        table = NoteTable(*(np.concatenate(parts) for parts in columns))
        # Stable: notes that are equal in all of these stay in the file's order.
        return table.select(np.lexsort((table.track, table.channel, table.pitch, table.onset_seconds)))

    def tempo_map(self, *, track: int = 0) -> TempoMap:
        """The tempo changes; `track` chooses one in a file of format 2.

        Raises:
            MediaError: the file counts SMPTE frames, or has no such track.
        """
        clock, _ = self._beat_clock(track)
        return TempoMap(clock.ticks, clock.seconds(clock.ticks), clock.lengths)

    def beats(self, *, track: int = 0, max_beats: int = DEFAULT_MAX_BEATS) -> Beats:
        """The beats by tempo and time signature (4/4 until one is set); `track` chooses one in format 2.

        Raises:
            MediaError: the file counts SMPTE frames, has no such track, or has more than `max_beats`.
        """
        clock, group = self._beat_clock(track)
        changes = _Timed([part.signatures for part in group])
        chosen = changes.last_of_each_tick() & (changes.ticks < clock.end)
        columns = (changes.ticks[chosen], changes.keys[chosen], changes.values[chosen])
        signatures = list(zip(*(column.tolist() for column in columns), strict=True))
        if not signatures or signatures[0][0] > 0:
            signatures.insert(0, (0, 4, 4))
        stops = [start for start, _, _ in signatures[1:]] + [clock.end]
        # A beat is quarters / denominator ticks, not always a whole number.
        quarters = 4 * self.division
        counts = [
            -(-(stop - start) * denominator // quarters)
            for (start, _, denominator), stop in zip(signatures, stops, strict=True)
        ]
        if sum(counts) > max_beats:
            raise MediaError("<midi>", f"has {sum(counts)} beats, expected at most {max_beats} (max_beats)")
        seconds: list[float] = []
        number: list[int] = []
        measure: list[int] = []
        measures = 0
        for (start, numerator, denominator), count in zip(signatures, counts, strict=True):
            seconds += _beat_times(clock, start, count, quarters, denominator)
            number += [k % numerator + 1 for k in range(count)]
            measure += [measures + k // numerator for k in range(count)]
            measures += -(-count // numerator)
        return Beats(np.array(seconds, np.float64), np.array(number, np.int64), np.array(measure, np.int64))

    def _beat_clock(self, track: int) -> tuple[_Clock, list[Track]]:
        if self.ticks_per_beat is None:
            raise MediaError("<midi>", "counts SMPTE frames, expected ticks per quarter note: it has no beats")
        index = track if self.format == 2 else 0
        if not 0 <= index < len(self._groups):
            raise MediaError("<midi>", f"has {len(self._groups)} tracks, expected a track {track}")
        return self._clocks[index], self._groups[index]


def _beat_times(clock: _Clock, start: int, count: int, quarters: int, denominator: int) -> list[float]:
    """Seconds of beats 0..count-1 from tick `start` on, each by one division of unbounded integers."""
    at = [(start * denominator + k * quarters) // denominator for k in range(count)]
    segments = np.searchsorted(clock.ticks, np.array(at, np.int64), side="right") - 1
    times = []
    for k, segment in enumerate(segments.tolist()):
        past = start * denominator + k * quarters - int(clock.ticks[segment]) * denominator
        units = int(clock.starts[segment]) * denominator + past * int(clock.lengths[segment])
        times.append(units / (clock.per_second * denominator))
    return times


def _notes_of(group: list[Track], clock: _Clock, first: int, *, sustain: bool) -> NoteTable:
    """The notes of tracks that share a timeline, track by track; `first` is the number of the first track."""
    onset = _concatenated([track.onset for track in group], "q")
    release = _concatenated([track.release for track in group], "q")
    pitch = _concatenated([track.pitch for track in group], "B")
    channel = _concatenated([track.channel for track in group], "B")
    program = _concatenated([track.program for track in group], "h").copy()
    changes = _Timed([track.programs for track in group])
    for number in np.unique(channel[program < 0]):
        of_channel = changes.keys == number
        ticks, values = changes.ticks[of_channel], np.append(changes.values[of_channel], 0)
        unset = (channel == number) & (program < 0)
        # Index -1, no program by then, finds the 0 at the end.
        program[unset] = values[np.searchsorted(ticks, onset[unset], side="right") - 1]
    if sustain:
        pedals = _Timed([track.pedals for track in group])
        for number in np.unique(channel):
            of_channel, ours = pedals.keys == number, channel == number
            pedal = (pedals.ticks[of_channel], pedals.values[of_channel])
            notes = (onset[ours], release[ours], pitch[ours].astype(np.int64))
            release = release.copy()
            release[ours] = _sustained(*notes, *pedal, clock.end)
    onset_units = clock.units(onset)
    tracks = np.repeat(np.arange(first, first + len(group)), [len(track.onset) for track in group])
    return NoteTable(
        onset_units / clock.per_second,
        (clock.units(release) - onset_units) / clock.per_second,
        pitch,
        _concatenated([track.velocity for track in group], "B"),
        channel,
        program.astype(np.uint8),
        tracks.astype(np.uint16),
    )


def _sustained(onset: _Ints, release: _Ints, pitch: _Ints, ticks: _Ints, pedal: _Ints, end: int) -> _Ints:
    """Where the notes of one channel end with its pedal, whose values start at `ticks`."""
    is_down = pedal >= _PEDAL_DOWN
    # Index -1, no pedal yet, finds the False at the end.
    is_held = np.append(is_down, False)[np.searchsorted(ticks, release, side="right") - 1]
    lifts = np.append(ticks[~is_down], end)
    lift = lifts[np.minimum(np.searchsorted(lifts, release, side="right"), len(lifts) - 1)]
    # Pitch and tick (below 2**53) in one number, so that one search finds the next onset of a pitch. A note that starts
    # and ends at one tick finds itself, and is not held.
    shifted = pitch << 54
    onsets = np.append(np.sort(shifted | onset), np.iinfo(np.int64).max)
    following = onsets[np.searchsorted(onsets, shifted | release, side="left")]
    again = np.where(following >> 54 == pitch, following & (2**54 - 1), end)
    return np.asarray(np.where(is_held, np.maximum(release, np.minimum(lift, again)), release), dtype=np.int64)


def parse_midi(
    data: Buffer,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_notes: int = DEFAULT_MAX_NOTES,
    max_duration_seconds: int = DEFAULT_MAX_DURATION_SECONDS,
) -> MIDIFile:
    """Read a Standard MIDI File, as described in `mm_assets.media.smf.read_tracks`.

    Args:
        data: the file.
        max_bytes: of the file.
        max_notes: of all tracks together.
        max_duration_seconds: of the longest track, at most `MAX_DURATION_SECONDS`.

    Raises:
        MediaError: not a MIDI file, a damaged one, or one past a limit.
    """
    score = read_tracks(data, max_bytes=max_bytes, max_notes=max_notes)
    return MIDIFile(score, max_seconds=min(max_duration_seconds, MAX_DURATION_SECONDS))
