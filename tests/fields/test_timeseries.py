import io
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import TimeSeries, TimeSeriesField
from mm_assets.testing import FieldSuite, same

TIMES = np.array([0.0, 0.5, 2.0])
ROWS = np.array([[1, 2], [3, 4], [5, 8]], np.float32)
SERIES = TimeSeries(TIMES, ROWS)
CSV = b"time,x,y\n0.0,1,2\n0.5,3,4\n2.0,5,8\n"


def npy(array):
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def column(values):
    return np.asarray(values).reshape(-1, 1)


class TestTimeSeriesField(FieldSuite):
    fields = [
        TimeSeriesField(),
        TimeSeriesField(num_steps=3),
        TimeSeriesField(num_columns=2, dtype="float32"),
        TimeSeriesField(timestamp_unit="ns"),
        TimeSeriesField(allow_equal=True),
        TimeSeriesField(columns={"left": (0, 7), "right": (7, 14)}),
    ]
    cases = [
        (SERIES, SERIES),
        ((TIMES, ROWS), SERIES),
        ((TIMES.astype(np.float32), column([1, 2, 3])), TimeSeries(TIMES, column([1, 2, 3]))),
        (
            (np.array([[1], [2]], np.int16), np.array([True, False])),
            TimeSeries(np.array([1.0, 2.0]), column([True, False])),
        ),
        ((TIMES.astype(">f8"), ROWS.astype(">f4")), SERIES),
        (CSV, TimeSeries(TIMES, ROWS.astype(np.float64))),
        (
            bytearray(b"\xef\xbb\xbf0, 1, 2\r\n\r\n .5,3,nan\r\n"),
            TimeSeries(TIMES[:2], np.array([[1, 2], [3, math.nan]])),
        ),
        ((TIMES, np.zeros((3, 2, 2), np.uint8)), TimeSeries(TIMES, np.zeros((3, 4), np.uint8))),
        ((TIMES, np.zeros((3, 0))), TimeSeries(TIMES, np.zeros((3, 0)))),
    ]
    empty = ((np.zeros(0), np.zeros((0, 4), np.int16)), TimeSeries(np.zeros(0), np.zeros((0, 4), np.int16)))
    maximum = (TimeSeriesField(num_steps=3, num_columns=2), SERIES)
    past_maximum = (TimeSeriesField(num_steps=2, num_columns=2), SERIES)
    wrong_types = ["a.csv", [1, 2], TIMES, (TIMES,), (TIMES.tolist(), ROWS), {"timestamps": TIMES}, 3.0]
    wrong_shapes = [
        (TIMES[:2], ROWS),
        (TIMES[::-1], ROWS),
        (np.array([0.0, 1.0, 1.0]), ROWS),
        (np.array([0.0, 1.0, np.nan]), ROWS),
        (np.array([0.0, 1.0, np.inf]), ROWS),
        (TIMES, ROWS.astype(np.complex64)),
        (TIMES.astype(np.longdouble), ROWS),
        (TIMES > 0, ROWS),
        (np.stack([TIMES, TIMES], 1), ROWS),
        (TIMES, np.float32(3) * np.ones((), np.float32)),
        TimeSeries(TIMES, ROWS, (("x", 0, 1),)),
        b"\xff\xfe",
        b"no commas at all",
        b"time,x\n0,1,2\n",
        b"0,1\n1\n",
        b"0,one\n1,two\n",
        b"t,x\n1_0,1\n",
        b"t,x\n1,2\n1,3\n",
        b"t,x\nnan,2\n",
    ]
    bad_configs = [
        {"num_steps": -1},
        {"num_columns": 2.0},
        {"dtype": "complex64"},
        {"dtype": "no such"},
        {"timestamp_unit": "min"},
        {"allow_equal": 0},
        {"columns": 3},
        {"columns": {"a": [2, 1]}},
        {"columns": {"a": [0]}},
        {"columns": {"a": {"start": 0}}},
        {"columns": ["a", "a"]},
        {"columns": [1]},
        {"columns": {"a": [0, 3]}, "num_columns": 2},
    ]


def decoded(field, value):
    return field.decode(*field.encode(value))


def test_decoding_copies_nothing():
    """Both arrays are read-only views of the payload."""
    metadata, data = TimeSeriesField().encode(SERIES)
    found = TimeSeriesField().decode(metadata, data)
    whole = np.frombuffer(data, np.uint8)
    for array in (found.timestamps, found.values):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


def test_a_payload_is_laid_out_as_documented():
    """Timestamps come first as float64, then the rows; the record has extent, dtype and span."""
    metadata, data = TimeSeriesField().encode(SERIES)
    assert data == TIMES.tobytes() + ROWS.tobytes()
    assert np.frombuffer(metadata, "<u4,<u4,S4,<u4,<f8,<f8")[0].item() == (3, 2, b"<f4", 0, 0.0, 2.0)
    parts = {item.part: item.data for item in TimeSeriesField().items(metadata, data)}
    assert parts == {"timestamps": TIMES.tobytes(), "values": ROWS.tobytes()}
    assert not TimeSeriesField().keeps_part("values")


def test_a_batch_of_fixed_extent_is_two_arrays():
    """With steps, columns and dtype fixed, payloads decode into given arrays, absent rows zero."""
    field = TimeSeriesField(num_steps=3, num_columns=2, dtype="float32")
    metadata, data = field.encode(SERIES)
    records = np.frombuffer(metadata * 2, np.uint8).reshape(2, -1)
    out = {"timestamps": np.full((2, 3), 9.0), "values": np.full((2, 3, 2), 9, np.float32)}
    values, present = field.decode_batch(records, [None, data], out)
    assert values["values"] is out["values"]
    assert present.tolist() == [False, True]
    np.testing.assert_array_equal(out["timestamps"], [np.zeros(3), TIMES])
    np.testing.assert_array_equal(out["values"], [np.zeros((3, 2)), ROWS])


# --- what it is made of -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timestamps", "values"),
    [
        (npy(TIMES), npy(ROWS)),
        (memoryview(npy(column(TIMES))), npy(np.asfortranarray(ROWS))),
        (TIMES.tolist(), npy(ROWS)),
        (b" [0, 0.5, 2]", npy(ROWS)),
        (TIMES, ROWS),
    ],
)
def test_a_series_is_made_of_two_contents(timestamps, values):
    """An .npy file's bytes, JSON text and parsed JSON lists make the same series."""
    assert TimeSeriesField().assemble({"timestamps": timestamps, "values": values}) == SERIES


def test_json_numbers_are_rounded_to_the_dtype():
    """Values from JSON are float64, or integers, or rounded to the field's dtype; those of arrays are never rounded."""
    contents = {"timestamps": [0, 1], "values": [[0.1, 1], [2, 3]]}
    assert TimeSeriesField().assemble(contents).values.dtype == np.float64
    assert TimeSeriesField().assemble(contents | {"values": [1, 2]}).values.dtype == np.int64
    rounded = TimeSeriesField(dtype="float32").assemble(contents).values
    assert same(rounded, np.array([[0.1, 1], [2, 3]], np.float32))
    with pytest.raises(EncodeError, match="exactly"):
        TimeSeriesField(dtype="float32").encode((np.array([0.0, 1.0]), np.array([[0.1], [0.2]])))


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"timestamps": [0, 1]}, "no values"),
        ({"timestamps": [0, 1], "values": [[1], [2, 3]]}, "one length"),
        ({"timestamps": [0, 1], "values": ["1", "2"]}, "str"),
        ({"timestamps": [0, None], "values": [1, 2]}, "NoneType"),
        ({"timestamps": [0, True], "values": [1, 2]}, "bool"),
        ({"timestamps": [0, 1], "values": [2**70, 1]}, "64 bits"),
        ({"timestamps": [0, 1], "values": {"a": 1}}, "JSON list"),
        ({"timestamps": b"\x93NUMPY broken", "values": [1, 2]}, "header"),
        ({"timestamps": b"{", "values": [1, 2]}, "neither"),
        ({"timestamps": b"[" * 100_000, "values": [1, 2]}, "neither"),
        ({"timestamps": [[[[[[[[[[0]]]]]]]]]], "values": [1]}, "deep"),
        ({"timestamps": [0, 1], "values": b""}, "neither"),
    ],
)
def test_contents_that_make_no_series(contents, words):
    """Contents that are not numbers in rows of one length are refused, and the part is named."""
    with pytest.raises(EncodeError, match=words):
        TimeSeriesField().assemble(contents)


def test_a_header_must_name_the_columns():
    """Where each column has a name, a CSV's header has to say the same names in the same order."""
    field = TimeSeriesField(columns=("x", "y"))
    assert decoded(field, CSV).column("y").tolist() == [[2.0], [4.0], [8.0]]
    with pytest.raises(EncodeError, match="header"):
        TimeSeriesField(columns=("y", "x")).encode(CSV)
    with pytest.raises(EncodeError, match="columns"):
        TimeSeriesField(columns=("x", "y", "z")).encode(b"0,1,2\n")


def test_a_csv_without_rows():
    """A header alone, or nothing, is a series without steps."""
    assert decoded(TimeSeriesField(), b"t,x,y\n").values.shape == (0, 2)
    assert decoded(TimeSeriesField(num_columns=4), b"").values.shape == (0, 4)


def test_column_groups_of_lerobot():
    """LeRobot's modality mapping names groups of columns, and comes back from the configuration."""
    field = TimeSeriesField(columns={"hand": {"start": 1, "end": 3}, "arm": {"start": 0, "end": 1}})
    assert field.columns == (("arm", 0, 1), ("hand", 1, 3))
    assert TimeSeriesField.from_config(json.loads(json.dumps(field.config))) == field
    found = decoded(field, (TIMES, np.arange(9).reshape(3, 3)))
    assert found.column("hand").tolist() == [[1, 2], [4, 5], [7, 8]]
    with pytest.raises(KeyError):
        found.column("leg")
    metadata, data = TimeSeriesField().encode(SERIES)
    with pytest.raises(FormatError, match="columns"):
        field.decode(metadata, data)


# --- clocks and dtypes ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5, unique=True),
    st.sampled_from(["s", "ms", "us", "ns"]),
)
@settings(deadline=None, max_examples=80)
def test_integer_clocks_are_divided_exactly(ticks, unit):
    """Each timestamp is the float64 nearest to ticks / unit, for clocks of any size, from arrays and from text."""
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    ticks = sorted(ticks)
    expected = [tick / per_second for tick in ticks]
    field = TimeSeriesField(timestamp_unit=unit, allow_equal=True)
    assert decoded(field, (np.array(ticks), np.zeros(len(ticks)))).timestamps.tolist() == expected
    text = "\n".join(f"{tick},0" for tick in ticks).encode()
    assert decoded(field, text).timestamps.tolist() == expected
    assert field.assemble({"timestamps": ticks, "values": [0] * len(ticks)}).timestamps.tolist() == expected


def test_clocks_of_short_floats_and_unsigned_integers():
    """Float32 timestamps are widened exactly, unsigned ones are never negative."""
    short = np.array([0.1, 0.2], np.float32)
    assert decoded(TimeSeriesField(), (short, short)).timestamps.tolist() == [float(short[0]), float(short[1])]
    large = np.array([2**63, 2**64 - 1], np.uint64)
    assert decoded(TimeSeriesField(timestamp_unit="ns"), (large, short)).timestamps.tolist() == [
        2**63 / 10**9,
        (2**64 - 1) / 10**9,
    ]


@given(
    hnp.arrays(st.sampled_from(["int8", "int64", "uint64", "float16", "float32", "float64", "bool"]).map(np.dtype), 4),
    st.sampled_from(["int8", "int16", "int64", "uint64", "float16", "float32", "float64", "bool"]),
)
@example(np.full(4, -1, np.float16), "uint64")  # comes back as infinity, of which NumPy warns
@settings(deadline=None, max_examples=200)
def test_conversions_change_no_value(values, dtype):
    """A conversion gives the same numbers, compared as Python's exact ones, or is refused where one would change."""
    field = TimeSeriesField(dtype=dtype)
    try:
        found = decoded(field, (np.arange(4.0), values)).values[:, 0]
    except EncodeError:
        with np.errstate(all="ignore"):
            cast = values.astype(dtype)
        exact = [a == b or (a != a and b != b) for a, b in zip(values.tolist(), cast.tolist(), strict=True)]
        # -0.0 and True are equal to 0 and 1; past the integer's range a machine may give anything.
        assert not all(exact) or (np.abs(values.astype(np.float64)) >= 2.0**63).any()
        return
    assert found.dtype == dtype
    for a, b in zip(values.tolist(), found.tolist(), strict=True):
        assert a == b or (a != a and b != b)


def test_equal_timestamps_on_request():
    """With allow_equal equal timestamps are a value, and decreasing ones are still refused."""
    twice = (np.array([0.0, 1.0, 1.0]), ROWS)
    field = TimeSeriesField(allow_equal=True)
    assert decoded(field, twice).timestamps.tolist() == [0, 1, 1]
    with pytest.raises(FormatError, match="increase"):
        TimeSeriesField().decode(*field.encode(twice))
    with pytest.raises(EncodeError, match="increase"):
        field.encode((TIMES[::-1], ROWS))


def test_a_payload_of_another_field_is_refused():
    """A payload of other extent or dtype than the field's is damage."""
    metadata, data = TimeSeriesField().encode(SERIES)
    for other in (TimeSeriesField(num_steps=2), TimeSeriesField(num_columns=3), TimeSeriesField(dtype="float64")):
        with pytest.raises(FormatError):
            other.decode(metadata, data)


# --- look-up by time --------------------------------------------------------------------------------------------------

GRID = st.integers(-1000, 1000).map(lambda k: k / 8)
CLOCKS = st.lists(GRID, min_size=1, max_size=12, unique=True).map(lambda times: np.array(sorted(times)))


@st.composite
def series(draw):
    times = draw(CLOCKS)
    elements = st.floats(-100, 100, width=32)
    return TimeSeries(times, draw(hnp.arrays(np.float64, (len(times), 2), elements=elements)))


@given(series(), st.lists(GRID, max_size=10))
@settings(deadline=None, max_examples=150)
def test_nearest_is_that_of_a_search_through_all(found, times):
    """The nearest step is the one of least distance, the earlier of two, for one time as for many."""
    expected = [int(np.argmin(np.abs(found.timestamps - time))) for time in times]
    index, values = found.nearest(np.array(times))
    assert index.tolist() == expected
    np.testing.assert_array_equal(values, found.values[expected] if expected else np.zeros((0, 2)))
    for time, step in zip(times, expected, strict=True):
        one, row = found.nearest(time)
        assert (one, row.tolist()) == (step, found.values[step].tolist())


@given(series(), st.lists(GRID, min_size=1, max_size=10), st.one_of(st.none(), st.integers(1, 80).map(lambda k: k / 8)))
@settings(deadline=None, max_examples=150)
def test_interpolation_is_the_straight_line(found, times, gap):
    """Interpolated values are those of a naive line; a hit is exact; outside and gaps go by the option."""
    lines = np.stack([np.interp(times, found.timestamps, column) for column in found.values.T], axis=1)
    outside = np.zeros(len(times), bool)
    for k, time in enumerate(times):
        below, above = found.timestamps[found.timestamps <= time], found.timestamps[found.timestamps >= time]
        outside[k] = not len(below) or not len(above) or (gap is not None and above[0] - below[-1] > gap)
    result = found.interpolate(times, outside="nan", max_gap_seconds=gap)
    assert np.isnan(result).all(axis=1).tolist() == outside.tolist()
    np.testing.assert_allclose(result[~outside], lines[~outside], rtol=0, atol=1e-12)
    clipped = found.interpolate(times, outside="clip", max_gap_seconds=gap)
    np.testing.assert_array_equal(clipped[outside], found.nearest(np.array(times)[outside])[1])
    for k, time in enumerate(times):
        if time in found.timestamps:
            assert result[k].tolist() == found.values[found.timestamps == time][0].tolist()
    if outside.any():
        with pytest.raises(ValueError, match="expected"):
            found.interpolate(times, max_gap_seconds=gap)
    else:
        np.testing.assert_array_equal(found.interpolate(times, max_gap_seconds=gap), result)


@given(series(), GRID, GRID)
@settings(deadline=None, max_examples=60)
def test_between_is_a_view_of_the_steps(found, start, end):
    """A slice by time has the steps from start up to, not with, end, and shares their memory."""
    chosen = found.between(start, end)
    expected = (found.timestamps >= start) & (found.timestamps < end)
    np.testing.assert_array_equal(chosen.timestamps, found.timestamps[expected])
    np.testing.assert_array_equal(chosen.values, found.values[expected])
    assert not len(chosen) or np.shares_memory(chosen.values, found.values)


def test_interpolated_dtypes():
    """Short floats stay float32, integers become float64, one time gives one row; values may be NaN."""
    assert SERIES.interpolate(1.25).tolist() == [4.0, 6.0]
    assert SERIES.interpolate(0.25).dtype == np.float32
    assert TimeSeries(TIMES, ROWS.astype(np.int16)).interpolate([0.25]).dtype == np.float64
    gaps = TimeSeries(TIMES, np.array([[1.0], [np.nan], [np.inf]]))
    assert np.isnan(gaps.interpolate([0.25, 0.5, 1.0])).all()
    assert gaps.interpolate([0.0, 2.0]).tolist() == [[1.0], [np.inf]]


def test_series_are_compared_by_everything_they_hold():
    """Two series are equal where times, values, dtype and column names are; NaN is equal to NaN."""
    gaps = np.array([[1.0], [np.nan], [3.0]])
    assert TimeSeries(TIMES, gaps) == TimeSeries(TIMES.copy(), gaps.copy())
    others = [
        TimeSeries(TIMES + 1, ROWS),
        TimeSeries(TIMES, ROWS + 1),
        TimeSeries(TIMES, ROWS.astype(np.float64)),
        TimeSeries(TIMES, ROWS, (("x", 0, 1),)),
        (TIMES, ROWS),
    ]
    assert all(other != SERIES for other in others)
    assert SERIES.duration_seconds == 2.0
    assert SERIES.between(3, 4).duration_seconds == 0.0


def test_equal_timestamps_give_the_last():
    """Where timestamps are equal, look-ups give the last of them."""
    twice = TimeSeries(np.array([0.0, 1.0, 1.0, 2.0]), column([0.0, 1.0, 5.0, 6.0]))
    assert twice.nearest(1.0)[0] == 2
    assert twice.nearest(0.75)[0] == 2
    assert twice.interpolate([1.0, 1.5]).tolist() == [[5.0], [5.5]]


@pytest.mark.parametrize(
    "call",
    [
        lambda: SERIES.nearest(np.nan),
        lambda: SERIES.nearest([[0.0]]),
        lambda: SERIES.nearest(9.0, max_distance_seconds=5),
        lambda: SERIES.interpolate(-0.1),
        lambda: SERIES.interpolate(2.1),
        lambda: SERIES.interpolate(1.0, max_gap_seconds=1.0),
        lambda: SERIES.interpolate(1.0, outside="hold"),
        lambda: TimeSeries(TIMES, column([True, False, True])).interpolate(1.0),
        lambda: SERIES.between(9, 10).nearest(0.0),
        lambda: TimeSeries(TIMES[::-1], ROWS),
        lambda: TimeSeries(TIMES, ROWS[:2]),
        lambda: TimeSeries(TIMES.astype(np.float32), ROWS),
        lambda: TimeSeries(TIMES, ROWS[:, 0]),
        lambda: TimeSeries(TIMES, ROWS, (("x", 1, 3),)),
    ],
)
def test_what_a_series_refuses(call):
    """A time or an option that has no answer, and arrays that are not a series, are a ValueError."""
    with pytest.raises(ValueError, match="expected"):
        call()


# --- real data --------------------------------------------------------------------------------------------------------


def test_real_pitch_notes(shared_data, members_of):
    """A published table of sung notes (onset, pitch, duration, without header) is a series."""
    ((_, data),) = members_of(shared_data, ("notes.csv",))
    found = decoded(TimeSeriesField(num_columns=2, columns=("pitch_hz", "duration_seconds")), data)
    lines = [[float(cell) for cell in line.split(",")] for line in data.decode().split()]
    np.testing.assert_array_equal(np.column_stack([found.timestamps, found.values]), lines)
    assert found.column("pitch_hz").min() > 50


CELLS = st.sampled_from(
    ["0", "1", "2.5", "-3e2", "nan", "inf", "1e999", "9" * 30, "x", "", " ", '"', "0x1", "1_0", "\u0661"]
)
LINES = st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=5)


@given(LINES, st.sampled_from(["\n", "\r\n", "\r", "\u2028"]), st.sampled_from(["s", "ns"]))
@settings(deadline=None, max_examples=300)
def test_any_text_is_a_series_or_refused(lines, end, unit):
    """Whatever a text holds, it is a series of its own numbers or an EncodeError."""
    field = TimeSeriesField(timestamp_unit=unit)
    try:
        found = decoded(field, end.join(lines).encode())
    except EncodeError:
        return
    assert np.isfinite(found.timestamps).all()
    assert len(found) <= len(lines)


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_a_content_or_refused(content):
    """Whatever bytes a content has, it is numbers or an EncodeError."""
    for start in (b"", b"[", b"\x93NUMPY\x01\x00"):
        try:
            TimeSeriesField().assemble({"timestamps": start + content, "values": [1, 2]})
        except EncodeError:
            continue
