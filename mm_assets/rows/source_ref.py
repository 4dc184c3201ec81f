"""`source_ref`: the JSON locator on each row that says where its content is.

`build_source_ref` writes one compact line with all five keys in a fixed order, so equal locators are equal text.
`parse_source_ref` does not trust its input: types, signs and bounds are checked, and anything else is a `SourceError`.
Parsing opens nothing; whether a locator may be followed is decided where it is followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from mm_assets.errors import EncodeError, LazyModule, SchemaMismatchError, SourceError, first_line, optional_import
from mm_assets.rows.schema import MULTIMODAL_SCHEMA, SOURCE_SCHEMA
from mm_assets.sources.folder import file_url

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = [
    "SourceRef",
    "SourceRefWriter",
    "build_source_ref",
    "from_pandas",
    "is_allowed_reference",
    "is_reference",
    "of_own_file",
    "parse_source_ref",
    "source_ref_of",
    "to_pandas",
    "with_parsed_source_ref_columns",
]

Strategy = Literal["range_read", "tar_extract", "direct_read"]

MAX_OFFSET = 2**63 - 1  # byte positions are int64 in every table
MAX_FRAME = 2**31 - 1  # frame numbers are int32
MAX_SHOWN = 120  # characters of a wrong locator that a message repeats

_OLDER_NAMES = {"path": "content_path", "member": "content_key"}
_encode_text = json.JSONEncoder(ensure_ascii=False).encode  # which `json.dumps` makes again for each text
_SURROGATE = re.compile("[\ud800-\udfff]")

_COLUMNS: dict[str, pa.DataType] = {
    "path": pa.string(),
    "member": pa.string(),
    "byte_offset": pa.int64(),
    "byte_size": pa.int64(),
    "frame_index": pa.int32(),
}

# The form that `build_source_ref` writes, where no string needs an escape: these are parsed in bulk.
_PLAIN_TEXT = r'"[^"\\\x00-\x1f]+"'
_PLAIN_NUMBER = r"0|[1-9][0-9]{0,17}"
_PLAIN_PARTS = {
    "path": f"null|{_PLAIN_TEXT}",
    "member": f"null|{_PLAIN_TEXT}",
    "byte_offset": f"null|{_PLAIN_NUMBER}",
    "byte_size": f"null|{_PLAIN_NUMBER}",
    "frame_index": "null|0|[1-9][0-9]{0,8}",
}


def _plain(*captured: str) -> str:
    """The pattern of the whole form, which captures some of its parts."""
    parts = (f'"{name}":({f"?P<{name}>" if name in captured else "?:"}{p})' for name, p in _PLAIN_PARTS.items())
    return rf"^\{{{','.join(parts)}\}}$"


# Two patterns: RE2 captures only up to four parts in one pass, and two of these take half the time of its other search.
_PLAIN = (_plain("path", "member", "byte_offset", "byte_size"), _plain("frame_index"))


class SourceRef(NamedTuple):
    """Where the content of a row is.

    Attributes:
        path: file path or URL; None where the row has no source.
        member: archive member, as the member index names it; None for a file that is not an archive.
        byte_offset: first byte of the content in the file, or None.
        byte_size: bytes of the content, or None.
        frame_index: frame of a multi-frame TIFF, from 0, or None for the whole content.
    """

    path: str | None
    member: str | None = None
    byte_offset: int | None = None
    byte_size: int | None = None
    frame_index: int | None = None

    @property
    def strategy(self) -> Strategy | None:
        """How the content is fetched, or None where there is no path."""
        if self.path is None:
            return None
        if self.byte_offset is not None and self.byte_size is not None:
            return "range_read"
        return "direct_read" if self.member is None else "tar_extract"

    def to_json(self) -> str:
        """The locator as rows carry it."""
        return _to_json(self.path, self.member, self.byte_offset, self.byte_size, self.frame_index)


def build_source_ref(
    *,
    path: str | None,
    member: str | None = None,
    byte_offset: int | None = None,
    byte_size: int | None = None,
    frame_index: int | None = None,
) -> str:
    """Writes a locator as compact JSON: all five keys in a fixed order; arguments as the attributes of `SourceRef`.

    Raises:
        EncodeError: a value has the wrong type or sign, or `parse_source_ref` would refuse it.
    """
    return _to_json(path, member, byte_offset, byte_size, frame_index)


def _to_json(*values: object) -> str:
    _refuse(*values)
    return json.dumps(dict(zip(_COLUMNS, values, strict=True)), ensure_ascii=False, separators=(",", ":"))


def _refuse(*values: object) -> None:
    problem = _problem(*values)
    if problem is not None:
        raise EncodeError(f"source_ref: {problem}")


class SourceRefWriter:
    """Writes many locators into one file; as `build_source_ref`, without checking the path each time.

    Members, offsets and sizes must come from a member index, which has checked them.

    Raises:
        EncodeError: the path is not one that a locator may hold.
    """

    def __init__(self, path: str) -> None:
        _refuse(path, None, None, None, None)
        self._head = f'{{"path":{_encode_text(path)},"member":'

    def __call__(
        self, member: str, byte_offset: int | None, byte_size: int | None, frame_index: int | None = None
    ) -> str:
        """The locator of one member; `byte_size` is left out where there is no `byte_offset`."""
        name = _encode_text(member)
        frame = "null" if frame_index is None else frame_index
        if byte_offset is None:
            return f'{self._head}{name},"byte_offset":null,"byte_size":null,"frame_index":{frame}}}'
        return f'{self._head}{name},"byte_offset":{byte_offset},"byte_size":{byte_size},"frame_index":{frame}}}'


def of_own_file(ref: SourceRef) -> SourceRef:
    """Returns the locator of the file that a member of a folder is; any other locator as it is.

    A name that no locator may have, such as one with a backslash, is read by its folder.
    """
    folder, name = ref.path, ref.member
    if folder is None or name is None or ref.byte_offset is not None or not folder.endswith("/"):
        return ref
    url = file_url(folder, name)
    return ref._replace(path=url, member=None) if is_allowed_reference(url, (folder,)) else ref


def parse_source_ref(value: str | None) -> SourceRef:
    """Reads a locator, also in its older forms.

    Older forms call path and member `content_path` and `content_key`, and may leave keys out or set them to null. Keys
    that are not known are ignored. A null or empty value is a locator without a path.

    Raises:
        SourceError: the value is not a JSON object, or holds a value of a wrong type, sign or size.
    """
    if value is None or value == "":
        return SourceRef(None)
    if not isinstance(value, str):
        raise SourceError("source_ref", f"is {type(value).__name__}, expected text")
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SourceError("source_ref", f"is not JSON ({first_line(error)}): {_shown(value)}") from error
    if not isinstance(found, dict):
        raise SourceError("source_ref", f"is a JSON {type(found).__name__}, expected an object: {_shown(value)}")
    return source_ref_of(found, text=value)


def source_ref_of(value: Mapping[str, Any], *, text: str | None = None) -> SourceRef:
    """A locator from its keys and values, as `parse_source_ref`; `text` is their JSON, for messages."""
    values = tuple(
        value.get(_OLDER_NAMES.get(name, name)) if value.get(name) is None else value[name] for name in _COLUMNS
    )
    problem = _problem(*values)
    if problem is not None:
        raise SourceError("source_ref", f"{problem}: {_shown(text or json.dumps(dict(value), default=str))}")
    return SourceRef(*values)


def _problem(path: object, member: object, byte_offset: object, byte_size: object, frame_index: object) -> str | None:
    """What is wrong with the five values, or None."""
    for name, text in (("path", path), ("member", member)):
        if text is None:
            continue
        if not isinstance(text, str):
            return f"{name} is {type(text).__name__}, expected text or null"
        if not text or "\0" in text or _SURROGATE.search(text):
            return f"{name} is empty or holds characters that no file name can have"
    limits = (("byte_offset", byte_offset, MAX_OFFSET), ("byte_size", byte_size, MAX_OFFSET))
    for name, number, limit in (*limits, ("frame_index", frame_index, MAX_FRAME)):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            return f"{name} is {type(number).__name__}, expected a whole number or null"
        if not 0 <= number <= limit:
            return f"{name} is out of range, expected 0 to {limit}"
    if isinstance(byte_offset, int):
        if not isinstance(byte_size, int):
            return "byte_offset is given without byte_size"
        if byte_offset + byte_size > MAX_OFFSET:
            return "byte_offset and byte_size together leave the range of 64 bits"
    return None if path is not None or (member, byte_offset) == (None, None) else "path is null, expected text"


def _shown(value: str) -> str:
    text = value.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def with_parsed_source_ref_columns(table: Any, prefix: str = "_src_") -> Any:
    """Adds the five parts of `source_ref` as columns.

    Args:
        table: a `pa.Table` or a pandas DataFrame with a column `source_ref`.
        prefix: put before ``path``, ``member``, ``byte_offset``, ``byte_size`` and ``frame_index``.

    Returns:
        The same kind of table with path and member (string), offset and size (int64) and frame (int32); null where the
        locator has no such part.

    Raises:
        SourceError: a locator is not valid; the message names its row.
        SchemaMismatchError: there is no column `source_ref`, it does not hold text, or there is a column of one of the
            new names already.
    """
    is_arrow = isinstance(table, pa.Table | pa.RecordBatch)
    if "source_ref" not in (table.schema.names if is_arrow else table.columns):
        raise SchemaMismatchError("the table has no column 'source_ref'")
    names = table.schema.names if is_arrow else table.columns
    taken = [prefix + name for name in _COLUMNS if prefix + name in names]
    if taken:
        detail = (
            f"the table has a column {', '.join(map(repr, taken))} already: drop or rename it, or use another prefix"
        )
        raise SchemaMismatchError(detail)
    if not is_arrow:
        pandas = _pandas()
        parsed = _parse_column(_as_string(pa.array(table["source_ref"], from_pandas=True)))
        series = {name: pandas.arrays.ArrowExtensionArray(pa.chunked_array([part])) for name, part in parsed.items()}
        return table.assign(**{prefix + name: pandas.Series(part, index=table.index) for name, part in series.items()})
    parsed = _parse_column(_as_string(table.column("source_ref")))
    result = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    for name, values in parsed.items():
        result = result.append_column(prefix + name, values)
    return result


def _as_string(refs: Any) -> Any:
    """A column of text of any Arrow type as string; `SchemaMismatchError` for any other type."""
    if pa.types.is_dictionary(refs.type):
        refs = refs.cast(refs.type.value_type)
    kind = refs.type
    if pa.types.is_string(kind):
        return refs
    text = pa.types.is_large_string(kind) or pa.types.is_null(kind) or kind == pa.string_view()
    if not text:
        raise SchemaMismatchError(f"column 'source_ref' is {kind}, expected text")
    return refs.cast(pa.string())


def _parse_column(refs: Any) -> dict[str, Any]:
    """The five parts of each locator of a string array."""
    refs = _one_array(refs)
    plain, plain_frame = (pc.extract_regex(refs, pattern=pattern) for pattern in _PLAIN)
    parts = dict(zip(_COLUMNS, (*plain.flatten(), *plain_frame.flatten()), strict=True))
    given = {name: pc.fill_null(pc.not_equal(part, "null"), False) for name, part in parts.items()}
    # A null locator gives null parts in bulk too; what is left is escaped, older, or wrong.
    odd_rows = pc.and_(pc.is_valid(refs), pc.is_null(plain))
    odd_rows = pc.or_(odd_rows, pc.and_not(given["byte_offset"], given["byte_size"]))
    odd_rows = pc.or_(odd_rows, pc.and_not(pc.or_(given["member"], given["byte_offset"]), given["path"]))
    left = pc.indices_nonzero(odd_rows).to_pylist()
    columns: dict[str, Any] = {}
    for name, kind in _COLUMNS.items():
        text = pc.utf8_slice_codeunits(parts[name], 1, -1) if kind == pa.string() else parts[name]
        columns[name] = pc.if_else(given[name], text, None).cast(kind)
    if not left:
        return columns
    odd: list[SourceRef] = []
    for row in left:
        try:
            odd.append(parse_source_ref(refs[row].as_py()))
        except SourceError as error:
            raise SourceError("source_ref", f"row {row}: {error.detail}") from error
    for name, kind in _COLUMNS.items():
        columns[name] = pc.replace_with_mask(columns[name], odd_rows, pa.array([getattr(r, name) for r in odd], kind))
    return columns


def _one_array(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _pandas() -> Any:
    with optional_import("pandas", "converting tables to pandas"):
        import pandas
    return pandas


def to_pandas(table: pa.Table) -> Any:
    """The table as a DataFrame whose columns keep their Arrow types, so that `from_pandas` loses nothing.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = _pandas()
    return table.to_pandas(types_mapper=pandas.ArrowDtype)


def from_pandas(frame: Any) -> pa.Table:
    """A DataFrame as a table: reserved columns get the types and nullability that they have in row tables.

    A column `source` or `source_member` without structs is one of another program, and stays as it is.

    Args:
        frame: a result of `to_pandas`, or any DataFrame; missing values (None, NaN, NaT, NA) become null. Its
            index is left out.

    Raises:
        SchemaMismatchError: a reserved column does not hold what it must, or a required one holds a null.
        MissingExtraError: pandas is not installed.
    """
    _pandas()
    arrays: list[Any] = []
    fields: list[Any] = []
    for name in frame.columns:
        known = MULTIMODAL_SCHEMA.field(name) if name in MULTIMODAL_SCHEMA.names else None
        try:
            if name in SOURCE_SCHEMA.names and pa.types.is_struct(pa.array(frame[name], from_pandas=True).type):
                known = SOURCE_SCHEMA.field(name)
            values = pa.array(frame[name], type=None if known is None else known.type, from_pandas=True)
            if known is not None and values.type != known.type:
                values = values.cast(known.type)
        except (pa.ArrowException, OverflowError) as error:
            expected = "" if known is None else f", expected {known.type}"
            raise SchemaMismatchError(f"column {name!r}: {first_line(error)}{expected}") from error
        values = _one_array(values)
        if known is not None and not known.nullable and values.null_count:
            raise SchemaMismatchError(f"column {name!r}: {values.null_count} values are missing, expected none")
        arrays.append(values)
        fields.append(known if known is not None else pa.field(str(name), values.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UP = re.compile(r"(?:^|/)(?:\.|%2e){2}(?:/|%2f|\\|$|\?|#)", re.IGNORECASE)
_BOUNDARY = ("/", "?", "#")


def is_reference(token: str) -> bool:
    """Whether a text is a URL or an absolute path."""
    return token.startswith("/") or _URL.match(token) is not None


def is_allowed_reference(token: str, prefixes: Iterable[str]) -> bool:
    """Whether a URL or absolute path is below one of `prefixes`.

    A prefix ends where a part of the path does: ``https://a.org`` allows neither ``https://a.org.b.net`` nor
    ``https://a.org@b.net``. References with ``..`` parts, control characters, backslashes or fsspec's ``::`` are never
    allowed.
    """
    if not is_reference(token) or _CONTROL.search(token) or "\\" in token or "::" in token:
        return False
    unescaped = re.sub(r"%2f", "/", token, flags=re.IGNORECASE)
    if _UP.search(unescaped):
        return False
    for prefix in prefixes:
        if prefix and token.startswith(prefix):
            rest = token[len(prefix) :]
            if not rest or prefix.endswith("/") or rest.startswith(_BOUNDARY):
                return True
    return False
