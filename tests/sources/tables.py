"""Tables of random samples, and what a container of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from mm_assets.sources.base import Source

_NAMES = ("jpg", "bin", "image", "txt", "caption", "json", "label", "state")
_CELL = st.none() | st.binary(max_size=9)
_FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_VALUES: tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...] = (
    (pa.binary(), st.binary(max_size=9)),
    (pa.large_binary(), st.binary(max_size=9)),
    (
        _FILE,
        st.fixed_dictionaries({"bytes": _CELL, "path": st.none() | st.text(max_size=5)}),
    ),
    (pa.string(), st.text(max_size=5) | st.sampled_from(['{"a": 1.50}', "[]"])),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.list_(pa.float32()), st.lists(st.floats(width=32), max_size=3)),
    (pa.list_(pa.binary()), st.lists(st.binary(max_size=9), max_size=3)),
)


@st.composite
def tables(draw: Callable[[st.SearchStrategy[Any]], Any]) -> pa.Table:
    """Tables with some rows, each with a key, and columns of any types with any names."""
    num_rows = draw(st.integers(1, 5))
    columns = {"__key__": pa.array([f"folder/{row}" for row in range(num_rows)])}
    for name in draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=4)):
        kind, values = draw(st.sampled_from(_VALUES))
        columns[name] = pa.array(draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)), kind)
    return pa.table(columns)


def entries(source: Source) -> list[tuple[str, int, str | None, bytes | None]]:
    """Returns the name, size, skip reason and content of each entry of a container, in order."""
    contents = {m.ordinal: bytes(data) for m, data in source.payloads(wanted=lambda _: True, max_bytes=1 << 20)}
    members = list(source.members())
    assert [member.ordinal for member in members] == list(range(len(members)))
    return [(m.member, m.byte_size, m.skip_reason, contents.get(m.ordinal)) for m in members]
