import io
import tarfile

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from mm_assets.errors import ConfigError
from mm_assets.fields import AudioField
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.media.silence import measure_silence
from mm_assets.rows.schema import DatasetSchema

RATE = 8000


def _sound(samples: np.ndarray, form: str = "WAV", subtype: str | None = None, rate: int = RATE) -> memoryview:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return memoryview(buffer.getvalue())


def _tone(seconds: float, amplitude: float, rate: int = RATE) -> np.ndarray:
    return (amplitude * np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * 400 / rate)).astype(np.float32)


def _judge(table: pa.Table, kind: str = "audio_silence", **config: object) -> list[tuple[int, str, float | None]]:
    """What the filter drops: (position, reason, value)."""
    built = build_filter({"type": kind, **config}, where="w", key="k")
    stream = FilterStream([table], annotators=[], filters=[built], schema=DatasetSchema(), on_empty_sample="keep")
    list(stream)
    rows = [row for part in stream.take_dropped() for row in part.to_pylist()]
    return [(r["position"], r["reason"], r["value"]) for r in rows]


# Duration


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_duration_limits_are_inclusive(make_table, wav, form):
    """Audio from the shortest to the longest duration is kept, both included, from the headers of every format."""
    durations = [0.5, 1.0, 2.0, 2.5]
    table = make_table({"a": [("audio", wav(s, channels=2, form=form)) for s in durations]})
    lossy = 0.2 if form in ("OGG", "MP3") else 0.0  # lossy codecs pad to whole blocks
    limits = {"min_seconds": 1.0 - lossy, "max_seconds": 2.0 + lossy}
    found = _judge(table, "audio_duration", **limits)
    assert [d[:2] for d in found] == [(0, "below_min"), (3, "above_max")]
    assert [d[2] for d in found] == pytest.approx([0.5, 2.5], abs=lossy)


def test_one_limit_is_enough_and_other_rows_pass(make_table, wav):
    """Only audio rows are judged; a limit that is not given is none."""
    table = make_table({"a": [("audio", wav(0.1)), ("text", "t"), ("image", b"?"), ("audio", wav(9))]})
    assert [d[0] for d in _judge(table, "audio_duration", min_seconds=1)] == [0]
    assert [d[0] for d in _judge(table, "audio_duration", max_seconds=1)] == [3]


def test_audio_without_a_duration_is_dropped_by_default(make_table):
    """Audio that is not there or cannot be read is dropped only by drop_invalid_rows."""
    table = make_table({"a": [("audio", None), ("audio", b"noise")]})
    assert [d[1] for d in _judge(table, "audio_duration", min_seconds=1)] == ["no_content", "unreadable"]
    assert _judge(table, "audio_duration", min_seconds=1, drop_invalid_rows=False) == []


# Silence


def test_the_share_decides_inclusively(make_table):
    """Sounds with at most the given share of silence are kept, the limit included; the value is the share."""
    sounds = [np.concatenate([np.zeros(round(share * RATE)), _tone(1 - share, 0.5)]) for share in (0.4, 0.5, 0.6, 1)]
    table = make_table({"a": [("audio", bytes(_sound(s))) for s in sounds] + [("text", "t"), ("image", b"?")]})
    assert _judge(table, max_silence=0.5) == [(2, "silence_above_max", 0.6), (3, "silence_above_max", 1.0)]
    assert _judge(table) == [(3, "silence_above_max", 1.0)]
    assert _judge(table, max_silence=1) == []


def test_silence_at_the_ends_decides(make_table):
    """Silence at the start and at the end have limits of their own, inclusive; the value is in seconds."""
    quiet, tone = np.zeros(RATE // 2), _tone(1, 0.5)
    sounds = [[tone], [quiet, tone], [tone, quiet], [quiet, tone, quiet], [tone, quiet, tone]]
    table = make_table({"a": [("audio", bytes(_sound(np.concatenate(s)))) for s in sounds]})
    ends = {"max_leading_seconds": 0.4, "max_trailing_seconds": 0.4}
    assert _judge(table, max_silence=None, **ends) == [
        (1, "leading_above_max", 0.5), (2, "trailing_above_max", 0.5), (3, "leading_above_max", 0.5)
    ]  # fmt: skip
    assert _judge(table, max_leading_seconds=0.5, max_trailing_seconds=0.5) == []


def test_threshold_and_level_are_parameters(make_table):
    """What counts as silence follows the threshold and the kind of level."""
    table = make_table({"a": [("audio", bytes(_sound(_tone(1, 0.01), "WAV", "FLOAT")))]})
    assert _judge(table) == []
    assert _judge(table, threshold_dbfs=-42.9) == [(0, "silence_above_max", 1.0)]
    assert _judge(table, threshold_dbfs=-42.9, level="peak") == []
    assert _judge(table, threshold_dbfs=-39.9, level="peak", window_seconds=0.1) == [(0, "silence_above_max", 1.0)]


def test_invalid_audio_rows_are_dropped_by_default(make_table):
    """Audio that is not there, at a negative position, or cannot be decoded is dropped only by drop_invalid_rows."""
    good = bytes(_sound(_tone(0.2, 0.5)))
    table = make_table({"a": [("audio", None), ("audio", b"noise"), ("audio", (-4, good)), ("audio", good)]})
    assert [d[:2] for d in _judge(table)] == [(0, "no_content"), (1, "unreadable"), (-4, "invalid_position")]
    assert _judge(table, drop_invalid_rows=False) == []


@pytest.mark.parametrize(
    ("parameters", "key", "message"),
    [
        ({"max_silence": 1.5}, "max_silence", "is 1.5, expected a share from 0 to 1"),
        ({"max_silence": None}, "max_silence", "is missing: give at least one of max_silence, max_leading_seconds"),
        ({"max_leading_seconds": -1}, "max_leading_seconds", "is -1, expected a number of at least 0"),
        ({"threshold_dbfs": 3}, "threshold_dbfs", "is 3, expected at most 0"),
        ({"threshold_dbfs": -201}, "threshold_dbfs", "is -201, expected a number of at least -200"),
        ({"level": "loud"}, "level", "is 'loud', allowed: rms, peak"),
        ({"window_seconds": 0}, "window_seconds", "is 0, expected a number of at least 0.001"),
        ({"drop_invalid_rows": 1}, "drop_invalid_rows", "is 1, expected true or false"),
    ],
)
def test_wrong_parameters_are_refused(parameters, key, message):
    """A parameter out of its range is refused when the declaration is loaded, by its name."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_filter({"type": "audio_silence", **parameters}, where="defs.yaml", key="filters[0]")
    assert caught.value.key == f"filters[0].{key}"


def test_the_annotator_gives_the_measures_of_the_filter(make_table, monkeypatch):
    """Audio rows carry share and seconds at both ends; a filter with the same parameters decodes nothing again."""
    from mm_assets.filters import audio as audio_filters

    calls = []

    def counted(data, **parameters):
        calls.append(parameters)
        return measure_silence(data, **parameters)

    monkeypatch.setattr(audio_filters, "measure_silence", counted)
    samples = np.concatenate([np.zeros(RATE // 4), _tone(0.5, 0.5), np.zeros(RATE // 4)])
    table = make_table({"a": [("audio", bytes(_sound(samples))), ("audio", b"?"), ("text", "t")]})
    annotator = build_annotator({"type": "silence", "threshold_dbfs": -50}, where="w", key="k")
    built = build_filter({"type": "audio_silence", "threshold_dbfs": -50}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=annotator.columns)
    (kept,) = FilterStream([table], annotators=[annotator], filters=[built], schema=schema)
    columns = ("audio_silence", "audio_leading_silence_seconds", "audio_trailing_silence_seconds")
    found = [tuple(row[c] for c in columns) for row in kept.to_pylist()]
    assert found == [(None, None, None), (0.5, 0.25, 0.25), (None, None, None)]
    assert len(calls) == 2


# Real recordings


def test_real_speech_is_kept_and_silence_is_not(make_table, shared_data):
    """Every recording of a real shard passes the defaults; the same recordings made silent do not."""
    field = AudioField(decoded="int16")
    samples, silenced = {}, {}
    for shard in ("speech/speech-00000.tar", "music/music-00000.tar"):
        with tarfile.open(shared_data / shard) as archive:
            for member in archive:
                if member.name.endswith((".wav", ".flac")):
                    data = archive.extractfile(member).read()
                    samples[member.name] = [("audio", data)]
                    sound = field.decode(*field.encode(data))
                    hushed = _sound(sound.samples // 20_000, rate=sound.sample_rate)
                    silenced[member.name] = [("audio", bytes(hushed))]
    assert len(samples) == 76
    assert _judge(make_table(samples)) == []
    assert {d[1] for d in _judge(make_table(silenced), threshold_dbfs=-50)} == {"silence_above_max"}
    assert len(_judge(make_table(silenced), threshold_dbfs=-50)) == 76
