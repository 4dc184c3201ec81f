"""What is fuzzed: for each target some valid inputs to start from, and what must hold of any input.

A target is a function of bytes. It raises what no caller should see; errors that are documented are caught.
"""

from __future__ import annotations

import importlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.dataset.add_stream import add_stream
from mm_assets.errors import EncodeError, FormatError, LimitError, MissingExtraError, ShardError, SourceError
from mm_assets.fields import Field, ScalarField
from mm_assets.formats import open_reader
from mm_assets.rows.base import row_sources
from mm_assets.rows.schema import DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import index_members, open_container
from mm_assets.storage.files import SourceFile
from mm_assets.testing import FieldSuite

from ..formats.examples import write

__all__ = ["TARGETS", "Target"]

MAX_CONTENT = 1 << 22  # bytes of a member that are decompressed


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads bytes from outside.

    Attributes:
        run: reads one input.
        seeds: makes valid inputs.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def _file(suffix: str) -> Path:
    return Path(tempfile.gettempdir()) / f"input{suffix}"


def _with_file(read: Callable[[Path], None], suffix: str, data: bytes) -> None:
    path = _file(suffix)
    path.write_bytes(data)
    read(path)


# -- sources


def _read_container(path: Path) -> None:
    with SourceFile(str(path)) as file:
        for policy in ("fail", "salvage"):
            try:
                source = open_container(file)
                members = list(source.members(on_damaged_shard=policy, damage=[]))
                passed = source.payloads(
                    wanted=lambda member: member.ordinal < 64,
                    max_bytes=MAX_CONTENT,
                    on_error=lambda member, error: None,
                    on_damaged_shard=policy,
                    damage=[],
                )
                for member, content in passed:
                    assert len(content) <= MAX_CONTENT, member
                assert [member.ordinal for member in members] == list(range(len(members)))
            except (ShardError, SourceError):
                continue


def _archives() -> Iterator[bytes]:
    for style in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for mode in ("w", "w:gz", "w:bz2", "w:xz"):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode=mode, format=style) as archive:
                for name, content in (
                    ("a.json", b'{"texts": ["x", null], "images": [null, "a.png"]}'),
                    ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(40)),
                    ("long/" * 20 + "n" * 60 + ".txt", "grün".encode("cp1252")),
                    ("b.txt.gz", b"\x1f\x8b\x08" + bytes(20)),
                ):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                link = tarfile.TarInfo("link")
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(link)
            yield buffer.getvalue()
    yield _cells()


def _cells() -> bytes:
    """A Parquet file whose values are members."""
    file = {"bytes": b"\xff\xd8\xff" + bytes(20), "path": "a.jpg"}
    rows = [{"image": file, "images": [file, None], "texts": [None, "b"], "n": 1.5}, {"image": None, "texts": ["c"]}]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=1)
    return buffer.getvalue()


def _read_rows(path: Path) -> None:
    with SourceFile(str(path)) as file:
        try:
            for source in row_sources([file]):
                batches = [batch for container in source.sources for batch in index_members(container)]
                read = partial(iter, batches)
                columns: tuple[UserColumn, ...] = ()
                if hasattr(source, "objects"):
                    columns = columns_of(source.objects(layout=MemberRules()), MemberRules(), shown=path.name)
                schema = DatasetSchema(user_columns=columns)
                stream = source.rows(read, layout=MemberRules(), schema=schema, grouped=False, batch_bytes=MAX_CONTENT)
                pa.Table.from_batches(list(stream), schema=schema.row_schema()).validate(full=True)
                stream.rejects().validate(full=True)
        except (ShardError, SourceError):
            return


def _lists() -> Iterator[bytes]:
    rows = [{"path": "a.png", "text": "a"}, {"path": "b.png", "text": None}]
    yield b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    yield buffer.getvalue()
    yield _cells()


# -- packed files


def _read_packed(path: Path) -> None:
    try:
        with open_reader(path) as reader:
            reader.verify()
            for index in range(min(len(reader), 64)):
                for name in reader.names:
                    reader.read_payload(index, name)
    except FormatError:
        return


def _add_to_packed(path: Path) -> None:
    try:
        add_stream(path, "added", ScalarField(dtype="float32"), [1.0, None, None, 2.0], fsync=False)
    except (FormatError, EncodeError):
        return
    with open_reader(path) as reader:
        assert "added" in reader.names


def _packed(form: str) -> Iterator[bytes]:
    from mm_assets.formats import MstrWriter, MultWriter

    path = _file(f".seed.{form}")
    write(MultWriter if form == "mult" else MstrWriter, path)
    yield path.read_bytes()


# -- fields


def _suites() -> dict[str, type[FieldSuite]]:
    """The first suite of each field's class."""
    for path in sorted((Path(__file__).parent.parent / "fields").glob("test_*.py")):
        importlib.import_module(f"tests.fields.{path.stem}")
    found: dict[str, type[FieldSuite]] = {}
    waiting = list(FieldSuite.__subclasses__())
    while waiting:
        suite = waiting.pop(0)
        waiting += suite.__subclasses__()
        if getattr(suite, "fields", None) and getattr(suite, "cases", None):
            found.setdefault(type(suite.fields[0]).__name__, suite)
    return found


def _decode(field: Field, data: bytes) -> None:
    size = field.metadata_type.itemsize
    metadata, content = data[:size], data[size:]
    if len(metadata) < size:
        return
    verdicts: list[bool] = []
    for judge in (field.decode, field.check_decodable):
        try:
            judge(metadata, content)
            verdicts.append(True)
        except (FormatError, LimitError):
            verdicts.append(False)
        except MissingExtraError:
            return
    assert verdicts[0] == verdicts[1], "decode and check_decodable disagree"


def _payloads(suite: type[FieldSuite]) -> Iterator[bytes]:
    for value, _ in suite.cases:
        encoded = suite.fields[0].encode(value)
        yield bytes(encoded.metadata) + bytes(encoded.data)


def _targets() -> Mapping[str, Target]:
    targets = {
        "tar": Target(partial(_with_file, _read_container, ".tar"), _archives),
        "rows": Target(partial(_with_file, _read_rows, ".tar"), _archives),
        "list": Target(partial(_with_file, _read_rows, ".jsonl"), _lists),
    }
    for form in ("mult", "mstr"):
        targets[form] = Target(partial(_with_file, _read_packed, f".{form}"), partial(_packed, form))
    targets["add-stream"] = Target(partial(_with_file, _add_to_packed, ".mstr"), partial(_packed, "mstr"))
    for name, suite in sorted(_suites().items()):
        targets[name] = Target(partial(_decode, suite.fields[0]), partial(_payloads, suite))
    return targets


TARGETS = _targets()
"""Every target by its name."""
