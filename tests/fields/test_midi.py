import io
import re
import struct
import time
from collections import deque
from fractions import Fraction

import mido
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, LimitError, MediaError
from mm_assets.fields import MIDI, MIDIField, NoteTable
from mm_assets.media.midi import parse_midi
from mm_assets.testing import FieldSuite, damaged


def number(value):
    """A variable-length number."""
    digits = [value & 0x7F]
    while value := value >> 7:
        digits.insert(0, value & 0x7F | 0x80)
    return bytes(digits)


def chunk(kind, body):
    return kind + struct.pack(">I", len(body)) + body


def track(*events, end=0):
    """A track of (delta ticks, event bytes), with an end mark `end` ticks after the last."""
    return chunk(b"MTrk", b"".join(number(delta) + event for delta, event in events) + number(end) + b"\xff\x2f\0")


def smf(*tracks, form=1, division=480, count=None):
    return chunk(b"MThd", struct.pack(">HHH", form, len(tracks) if count is None else count, division)) + b"".join(
        tracks
    )


def on(pitch, velocity=64, channel=0):
    return bytes([0x90 | channel, pitch, velocity])


def off(pitch, channel=0):
    return bytes([0x80 | channel, pitch, 0])


def pedal(value, channel=0):
    return bytes([0xB0 | channel, 64, value])


def program(value, channel=0):
    return bytes([0xC0 | channel, value])


def tempo(microseconds):
    return b"\xff\x51\x03" + microseconds.to_bytes(3, "big")


def signature(numerator, power):
    return bytes([0xFF, 0x58, 4, numerator, power, 24, 8])


def table(*rows):
    """Notes of (onset, duration, pitch, velocity, channel, program, track)."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    dtypes = (np.float64, np.float64, np.uint8, np.uint8, np.uint8, np.uint8, np.uint16)
    return NoteTable(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


def notes_of(data, **options):
    return parse_midi(data).notes(**options)


SCALE = smf(track((0, on(60)), (240, off(60)), (0, on(62, 80)), (240, on(62, 0)), end=480), form=0)
SCALE_NOTES = table((0.0, 0.25, 60, 64, 0, 0, 0), (0.25, 0.25, 62, 80, 0, 0, 0))
DUET = smf(
    track((0, tempo(600_000)), (480, tempo(300_000))),
    track((0, program(7, 2)), (480, on(40, 5, 2)), (480, off(40, 2)), end=96),
    division=480,
)
DUET_NOTES = table((0.6, 0.3, 40, 5, 2, 7, 1))
EMPTY = smf()


class TestMIDIField(FieldSuite):
    fields = [
        MIDIField(),
        MIDIField(sustain=True),
        MIDIField(max_bytes=100),
        MIDIField(max_notes=2),
        MIDIField(max_duration_seconds=1),
    ]
    cases = [
        (SCALE, MIDI(SCALE, SCALE_NOTES, 1.0)),
        (bytearray(DUET), MIDI(DUET, DUET_NOTES, 0.96)),
        (MIDI(SCALE, SCALE_NOTES, 1.0), MIDI(SCALE, SCALE_NOTES, 1.0)),
    ]
    empty = (EMPTY, MIDI(EMPTY, table(), 0.0))
    maximum = (MIDIField(max_notes=2, max_duration_seconds=1, max_bytes=len(SCALE)), SCALE)
    past_maximum = (MIDIField(max_notes=1), SCALE)
    wrong_types = ["piece.mid", [1], SCALE_NOTES, MIDI("text", SCALE_NOTES, 1.0), MIDI(SCALE, [], 1.0)]
    wrong_shapes = [
        b"",
        b"RIFF" + SCALE,
        SCALE[:-1],
        SCALE[:13],
        MIDI(SCALE, DUET_NOTES, 1.0),
        MIDI(SCALE, SCALE_NOTES, 2.0),
    ]
    bad_configs = [
        {"sustain": 1},
        {"max_notes": 0},
        {"max_bytes": 2**40},
        {"max_duration_seconds": 259_201},
        {"max_notes": True},
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("max_bytes", len(SCALE) - 1), ("max_duration_seconds", 1), ("max_notes", 1)]
)
def test_limits_hold_both_ways(name, value):
    """A file past a limit is refused by encode, and its payload by a field of that limit."""
    field = MIDIField(**{name: value})
    data = SCALE if name != "max_duration_seconds" else DUET.replace(tempo(300_000), tempo(900_000))
    with pytest.raises(LimitError, match=rf"expected \w.* \({name}\)"):
        field.encode(data)
    with pytest.raises(LimitError, match=rf"expected \w.* \({name}\)"):
        field.decode(*MIDIField().encode(data))


def test_note_tables_are_compared_by_column():
    """Two tables are equal if all their columns are, and a table is not equal to a tuple."""
    assert notes_of(SCALE) == SCALE_NOTES
    assert notes_of(SCALE) != table((0.0, 0.25, 60, 64, 0, 0, 0), (0.25, 0.25, 62, 81, 0, 0, 0))
    assert SCALE_NOTES.columns() != SCALE_NOTES
    assert SCALE_NOTES.select(SCALE_NOTES.pitch > 60) == table((0.25, 0.25, 62, 80, 0, 0, 0))


def test_the_record_has_the_facts():
    """The record has division, tracks and both ends, the same with the pedal applied or not."""
    data = smf(track((0, pedal(127)), (0, on(60)), (480, off(60)), (480, pedal(0)), end=480), form=0)
    for field in (MIDIField(), MIDIField(sustain=True)):
        record = np.frombuffer(field.encode(data).metadata, field.metadata_type)[0]
        names = ("num_notes", "num_tracks", "division", "format", "duration_us", "last_note_end_us")
        assert [int(record[name]) for name in names] == [1, 1, 480, 0, 1_500_000, 500_000]


# --- what a file says -------------------------------------------------------------------------------------------------


def test_same_pitch_notes_pair_first_in_first_out():
    """Overlapping notes of one pitch end in the order that they started, each channel and track on its own."""
    data = smf(
        track((0, on(60, 1)), (96, on(60, 2)), (96, off(60)), (96, off(60)), (0, off(60)), (0, on(60, 3, 1)), end=96),
        track((48, on(60, 4)), (48, off(60)), end=0),
        division=96,
    )
    assert notes_of(data) == table(
        (0.0, 1.0, 60, 1, 0, 0, 0),
        (0.25, 0.25, 60, 4, 0, 0, 1),
        (0.5, 1.0, 60, 2, 0, 0, 0),
        (1.5, 0.5, 60, 3, 1, 0, 0),
    )


def test_a_note_without_end_ends_with_its_track():
    """A hanging note lasts up to the track's end mark, or its last event where there is none."""
    body = b"\0" + on(60) + number(960) + on(61)
    assert notes_of(smf(chunk(b"MTrk", body))).duration_seconds.tolist() == [1.0, 0.0]
    ended = chunk(b"MTrk", body + number(480) + b"\xff\x2f\0" + b"what follows is not read")
    assert notes_of(smf(ended)).duration_seconds.tolist() == [1.5, 0.5]


def test_running_status_and_system_events():
    """Running status goes on over meta events and is cancelled by system-exclusive ones."""
    text = b"\xff\x01\x03abc"
    body = b"\0" + on(60) + b"\x60\x3e\x40" + b"\0" + text + b"\x60\x40\x40" + b"\0\xf0\x02\x01\xf7"
    assert notes_of(smf(chunk(b"MTrk", body))).pitch.tolist() == [60, 62, 64]
    with pytest.raises(MediaError, match="status"):
        parse_midi(smf(chunk(b"MTrk", body + b"\0\x41\x40")))


def test_format_2_tracks_are_pieces_of_their_own():
    """In format 2 each track starts at 0 with its own tempo; in format 1 the tempo is shared."""
    tracks = (track((0, tempo(1_000_000)), (480, on(60)), (480, off(60))), track((480, on(61)), (480, off(61))))
    assert notes_of(smf(*tracks, form=2)).onset_seconds.tolist() == [0.5, 1.0]
    assert notes_of(smf(*tracks, form=2)).track.tolist() == [1, 0]
    assert notes_of(smf(*tracks, form=1)).onset_seconds.tolist() == [1.0, 1.0]
    assert parse_midi(smf(*tracks, form=2)).tempo_map(track=1).microseconds_per_beat.tolist() == [500_000]
    with pytest.raises(MediaError, match="track 2"):
        parse_midi(smf(*tracks, form=2)).beats(track=2)


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [(24, Fraction(1, 24)), (25, Fraction(1, 25)), (29, Fraction(1001, 30_000)), (30, Fraction(1, 30))],
)
def test_smpte_divisions_count_frames(rate, seconds):
    """With an SMPTE division a tick is a part of a frame, whatever the tempo; such a file has no beats."""
    data = smf(track((0, tempo(1)), (1234, on(60)), (40, off(60))), form=0, division=(256 - rate) << 8 | 40)
    found = notes_of(data)
    assert found.onset_seconds[0] == float(1234 * seconds / 40)
    assert found.duration_seconds[0] == float(seconds)
    with pytest.raises(MediaError, match="SMPTE"):
        parse_midi(data).beats()


def test_programs_of_a_track_and_of_the_file():
    """A note has its own track's program, else the one set in another track by then, else 0."""
    data = smf(
        track((0, program(5, 0)), (480, program(6, 0)), (480, program(9, 1))),
        track((0, on(60)), (480, on(61)), (1, program(80)), (1, on(62)), (0, on(63, channel=1))),
    )
    assert notes_of(data).program.tolist() == [5, 6, 80, 0]


def test_the_pedal_holds_notes_on_request():
    """With sustain, a released note lasts until the pedal lifts, its pitch starts again, or the tracks end."""
    data = smf(
        track((0, pedal(100)), (480, pedal(0)), (480, pedal(64)), (480, pedal(63, 5))),
        track((0, on(60)), (48, off(60)), (48, on(60)), (48, off(60)), (48, on(61)), (480, off(61)), end=1),
        track((0, on(60, 64, 1)), (96, off(60, 1)), (1104, on(70)), (60, off(70)), end=600),
        division=480,
    )
    plain, held = notes_of(data), notes_of(data, sustain=True)
    assert (plain.pitch.tolist(), plain.channel.tolist()) == ([60, 60, 60, 61, 70], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(plain.duration_seconds * 960, [48, 96, 48, 480, 60])
    # 60 is struck again at 96; then the pedal lifts at 480; 61 is released after that; 70 sounds to the end at 1860.
    np.testing.assert_array_equal(held.duration_seconds * 960, [96, 96, 384, 480, 660])


def test_alien_chunks_and_trailing_bytes_are_skipped():
    """Chunks of other kinds, a longer header and bytes after the last track change nothing."""
    body = track((0, on(60)), (480, off(60)))
    header = chunk(b"MThd", struct.pack(">HHH", 0, 1, 480) + b"more")
    assert notes_of(header + chunk(b"XFIH", b"abc") + body + b"\0\0junk") == notes_of(smf(body, form=0))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (smf(track(), form=3), "format"),
        (smf(track(), track(), form=0), "format 0"),
        (smf(track(), division=0), "division"),
        (smf(track(), division=0xE600), "division"),
        (smf(track(), division=0xE104), "division"),
        (smf(track(), count=2), "ends after 1 tracks"),
        (smf(count=4097), "tracks"),
        (smf(chunk(b"MTrk", b"\0\x90\x40")), "below 0x80"),
        (smf(chunk(b"MTrk", b"\0\x90\x40\x80")), "below 0x80"),
        (smf(chunk(b"MTrk", b"\0\x40\x40")), "status"),
        (smf(chunk(b"MTrk", b"\0\xf8")), "status"),
        (smf(chunk(b"MTrk", b"\0\xff")), "type"),
        (smf(chunk(b"MTrk", b"\0")), "event"),
        (smf(chunk(b"MTrk", b"\0\xff\x01\x05ab")), "5 bytes"),
        (smf(chunk(b"MTrk", b"\0\xf0\x05ab")), "5 bytes"),
        (smf(chunk(b"MTrk", b"\x80\x80\x80\x80\0\xff\x2f\0")), "four bytes"),
        (smf(track((0, tempo(0)))), "tempo"),
        (smf(track((0, b"\xff\x51\x02\1\1"))), "tempo"),
        (smf(track((0, signature(0, 2)))), "time signature"),
        (smf(track((0, signature(4, 8)))), "time signature"),
        (smf(track((2**28 - 1, on(60)))), "seconds long"),
        (smf(*[track(*[(2**28 - 1, tempo(2**24 - 1))] * 40)], division=1), "seconds long"),
    ],
)
def test_what_is_refused(data, words):
    """A file that contradicts itself, or that is longer than a day, is refused and the words tell why."""
    with pytest.raises(MediaError, match=words):
        parse_midi(data)
    with pytest.raises(EncodeError, match=words):
        MIDIField().encode(data)


def test_hostile_lengths_take_no_time():
    """A megabyte of an endless number, and a megabyte of tempo changes, take seconds of processor time."""
    start = time.process_time()
    with pytest.raises(MediaError, match="four bytes"):
        parse_midi(smf(chunk(b"MTrk", b"\x80" * 2**20)))
    parse_midi(smf(chunk(b"MTrk", (b"\1" + tempo(1)) * 150_000))).notes()
    parse_midi(smf(*[track((0, on(60)))] * 4096, form=2)).notes(sustain=True)
    assert time.process_time() - start < 10


# --- time -------------------------------------------------------------------------------------------------------------

EVENTS = st.one_of(
    st.tuples(st.just("on"), st.integers(58, 61), st.integers(0, 127), st.integers(0, 1)),
    st.tuples(st.just("off"), st.integers(58, 61), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("tempo"), st.integers(1, 2**24 - 1)),
    st.tuples(st.just("program"), st.integers(0, 127), st.integers(0, 1)),
    st.tuples(st.just("text"), st.binary(max_size=5)),
)
TRACKS = st.lists(st.lists(st.tuples(st.integers(0, 20_000), EVENTS), max_size=20), min_size=1, max_size=3)


def written(event):
    kind, *values = event
    if kind == "on":
        return on(*values)
    if kind == "off":
        return off(values[0], values[2])
    if kind == "text":
        return b"\xff\x01" + number(len(values[0])) + values[0]
    return tempo(*values) if kind == "tempo" else program(*values)


def reference_notes(data):
    """(onset, duration, pitch, velocity, channel, track), by mido's events and fractions of a second."""
    file = mido.MidiFile(file=io.BytesIO(data))
    absolute = [list(zip(np.cumsum([m.time for m in part]).tolist(), part, strict=True)) for part in file.tracks]
    tempos = sorted(
        ((tick, message.tempo) for part in absolute for tick, message in part if message.type == "set_tempo"),
        key=lambda entry: entry[0],
    )

    def seconds(tick):
        total, last, length = Fraction(0), 0, 500_000
        for start, value in tempos:
            if start > tick:
                break
            total, last, length = total + (start - last) * length, start, value
        return (total + (tick - last) * length) / (file.ticks_per_beat * 1_000_000)

    found = []
    for index, part in enumerate(absolute):
        waiting = {}
        for tick, message in part:
            if message.type == "note_on" and message.velocity:
                entry = [tick, part[-1][0], message, index]
                waiting.setdefault((message.channel, message.note), deque()).append(entry)
                found.append(entry)
            elif message.type in ("note_on", "note_off"):
                queue = waiting.get((message.channel, message.note))
                if queue:
                    queue.popleft()[1] = tick
    rows = [
        (float(seconds(start)), float(seconds(end) - seconds(start)), m.note, m.velocity, m.channel, index)
        for start, end, m, index in found
    ]
    return sorted(rows, key=lambda row: (row[0], row[2], row[4], row[5]))


def rows_of(notes):
    columns = (notes.onset_seconds, notes.duration_seconds, notes.pitch, notes.velocity, notes.channel, notes.track)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(TRACKS, st.integers(1, 2000))
@settings(deadline=None, max_examples=100)
def test_notes_are_those_of_another_reader_in_exact_arithmetic(tracks, division):
    """Notes are mido's, and each time is the float64 nearest to the exact fraction of a second."""
    data = smf(
        *(track(*((delta, written(event)) for delta, event in part), end=3) for part in tracks), division=division
    )
    try:
        found = parse_midi(data, max_duration_seconds=259_200).notes()
    except MediaError as error:
        assert "seconds long" in str(error)  # noqa: PT017  # the bytes may also be valid
        return
    assert rows_of(found) == reference_notes(data)


def test_an_hour_of_odd_tempos_is_exact():
    """After an hour of changing tempos, an onset is still the nearest float64: no error gathers."""
    strokes = [(70, on(60)), (0, off(60)), (0, tempo(333_333)), (90, tempo(1_000_003))] * 40_000
    found = notes_of(smf(track(*strokes), form=0, division=997))
    second = 997 * 1_000_000  # in units
    first, between = 70 * 500_000, 90 * 333_333 + 70 * 1_000_003
    expected = [float(Fraction(first + k * between, second)) for k in range(40_000)]
    assert found.onset_seconds.tolist() == expected
    assert expected[-1] > 3600


def test_beats_follow_tempo_and_time_signature():
    """Beats are the signature's unit, numbered within measures, and a change of signature starts a measure."""
    data = smf(track((0, signature(3, 2)), (0, tempo(500_000)), (960, tempo(250_000)), (480, signature(6, 3)), end=960))
    found = parse_midi(data).beats()
    assert found.seconds.tolist() == [0.0, 0.5, 1.0, 1.25, 1.375, 1.5, 1.625]
    assert found.number.tolist() == [1, 2, 3, 1, 2, 3, 4]
    assert found.measure.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert parse_midi(data).tempo_map().seconds.tolist() == [0.0, 1.0]
    with pytest.raises(MediaError, match="7 beats"):
        parse_midi(data).beats(max_beats=6)


def test_beats_need_not_fall_on_ticks():
    """A sixteenth at 10 ticks a quarter is two and a half ticks, and its time is exact."""
    found = parse_midi(smf(track((0, signature(5, 4)), end=20), division=10)).beats()
    assert found.seconds.tolist() == [k / 8 for k in range(8)]


def test_default_signature_holds_up_to_the_first():
    """Before the first time signature there are four quarters a measure; no file has beats past its end."""
    assert parse_midi(smf(track((480 * 5, signature(2, 2)), end=0))).beats().number.tolist() == [1, 2, 3, 4, 1]
    assert len(parse_midi(EMPTY).beats().seconds) == 0


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=200)
def test_any_track_bytes_are_read_or_refused(body):
    """Whatever bytes a track holds, reading it ends in notes or a MediaError."""
    try:
        file = parse_midi(smf(chunk(b"MTrk", body)))
    except MediaError:
        return
    notes = file.notes(sustain=True)
    assert len(notes) == file.num_notes
    assert (notes.duration_seconds >= 0).all()
    assert (notes.end_seconds <= file.duration_seconds + 1e-9).all()


def test_damage_to_a_piece_with_everything_in_it():
    """Flipped, cut and extended files with pedals, programs and signatures are read or refused."""
    data = smf(track((0, pedal(99)), (1, program(3)), (1, signature(4, 2)), (2, on(60)), (1, tempo(9)), (0, off(60))))
    for _, broken in damaged(b"", data):
        try:
            file = parse_midi(broken)
        except MediaError:
            continue
        file.notes(sustain=True)
        assert len(file.notes()) == file.num_notes


# --- real music -------------------------------------------------------------------------------------------------------


def test_real_pieces(shared_data, members_of):
    """Every piece of the corpora is kept byte for byte, and its notes are mido's in exact arithmetic."""
    count = 0
    for name, data in members_of(shared_data, (".mid",)):
        count += 1
        encoded = MIDIField().encode(data)
        assert encoded.data == data
        assert rows_of(MIDIField().decode(*encoded).notes) == reference_notes(data), name
        found = parse_midi(data).beats()
        assert (np.diff(found.seconds) > 0).all()
    assert count == 8


def test_onsets_are_those_of_the_alignments(shared_data, members_of):
    """Pitch, onset, release and velocity of every performed note are those of the corpus's own alignment file."""
    pieces = dict(members_of(shared_data, (".mid",)))
    count = 0
    for name, content in members_of(shared_data, (".match",)):
        text = content.decode()
        units = int(re.search(r"midiClockUnits,(\d+)", text)[1])
        rate = int(re.search(r"midiClockRate,(\d+)", text)[1])
        notes = re.findall(r"note\(\w+,(\d+),(\d+),(\d+),(\d+),\d+,\d+\)", text)
        listed = sorted(tuple(map(int, note)) for note in notes)
        found = notes_of(pieces[name.removesuffix(".match") + ".mid"])
        per_second = units * 1_000_000 / rate
        starts = np.rint(found.onset_seconds * per_second).astype(int)
        stops = np.rint(found.end_seconds * per_second).astype(int)
        ours = zip(found.pitch.tolist(), starts.tolist(), stops.tolist(), found.velocity.tolist(), strict=True)
        assert sorted(ours) == listed, name
        count += 1
    assert count == 7
