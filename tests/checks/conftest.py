"""Fixtures: a whole partition made by the real stages' functions, of which tests spoil one file at a time."""

import io
import json
import shutil
import tarfile
import wave
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mm_assets.checks.context import CheckContext, TableFile
from mm_assets.checks.outcome import Outcome
from mm_assets.checks.packed import ExpectedRows, PackedFiles
from mm_assets.checks.runner import run_checks
from mm_assets.filters.apply import FilterStream
from mm_assets.packing.judge import packable
from mm_assets.packing.pack import pack_rows
from mm_assets.packing.placement import Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.packing.presets import choose_plan
from mm_assets.pipeline.chain import CHAIN
from mm_assets.rows.columns import RowStream
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import ParquetSink, read_batches, sample_groups
from mm_assets.rows.schema import DROPPED_SCHEMA, REJECTS_SCHEMA, UNDECODABLE_SCHEMA, DatasetSchema, MemberRules
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import index_members
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA
from mm_assets.sources.tar import TarSource
from mm_assets.sources.text_members import parse_object
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Store

BATCH = 1 << 20
OWN = {"rows": ("rows", "rejects"), "filtered_rows": ("filtered_rows", "dropped", "undecodable")}


def picture(shade: int, kind: str = "PNG", size: tuple[int, int] = (24, 16)) -> bytes:
    """A small image of one colour."""
    target = io.BytesIO()
    Image.new("RGB", size, (shade, 255 - shade, 7)).save(target, kind)
    return target.getvalue()


def frames(*shades: int) -> bytes:
    """A TIFF of several frames."""
    pages = [Image.new("RGB", (20, 10), (shade, 9, 9)) for shade in shades]
    target = io.BytesIO()
    pages[0].save(target, "TIFF", save_all=True, append_images=pages[1:], compression="tiff_deflate")
    return target.getvalue()


def sound(num_frames: int = 80) -> bytes:
    """A WAV file of silence."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(2 * num_frames))
    return target.getvalue()


def array_file(*values: float) -> bytes:
    """A .npy file."""
    target = io.BytesIO()
    np.save(target, np.array(values))
    return target.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A tar of these members, in order."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


MEMBERS: tuple[tuple[str, bytes], ...] = (
    ("a.png", picture(10)),
    ("a.txt", "eine Überschrift".encode()),
    ("a.json", json.dumps({"source": "made up", "score": 0.5}).encode()),
    ("._a.png", b"resource fork"),
    ("b.0.jpg", picture(20, "JPEG")),
    ("b.1.jpg", picture(30, "JPEG")),
    ("b.json", b'{"source": "made up", "score": 1}'),
    ("c.wav", sound()),
    ("c.txt", b"silence"),
    ("d.state.npy", array_file(1.0, 2.0)),
    ("d.weird.xyz", b"\x00\x01binary"),
    ("d.json", b'{"source": null}'),
    ("e.json", json.dumps({"texts": ["one", None, "two"], "images": [None, "p0", None]}).encode()),
    ("e.tiff", frames(1)),
    ("f.state.npy", array_file(3.0, 4.0)),
    ("f.png", b"no image at all"),
)
"""Samples of every kind: captioned, numbered images, sound, arrays, unknown files, interleaved, a broken image."""


@dataclass(kw_only=True)
class Partition:
    """A partition's files and what made them."""

    root: Path
    shard: Path
    schema: DatasetSchema
    plan: PackPlan
    store: Store
    mode: str = "read"
    packed: tuple[str, ...] = ("mult", "mstr")
    collected: ExpectedRows | None = None  # by the last packing
    packed_rows: bytes = b""  # the table that it packed

    def path(self, table: str) -> Path:
        """The file of a table."""
        return self.root / table / "p.parquet"

    def read(self, table: str) -> pa.Table:
        """A table as it stands now."""
        return pq.read_table(self.path(table), partitioning=None)

    def write(self, table: str, content: pa.Table) -> None:
        """Replaces a table by any other."""
        with self.path(table).open("wb") as file:
            pq.write_table(content, file)

    def spoil(self, table: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Lets `change` alter, in place or by its result, the rows of a table."""
        before = self.read(table)
        rows = before.to_pylist()
        after = change(rows)
        rows = rows if after is None else after
        self.write(table, pa.Table.from_pylist(rows, before.schema))

    def context(self, asset: str, **changes: Any) -> CheckContext:
        """What the checks of an asset are given, with changes."""
        stage = next(stage for stage in CHAIN if stage.name == asset)
        made = CheckContext(
            asset=asset,
            store=self.store,
            tables={
                table.name: TableFile(path=f"{table.name}/p.parquet", schema=table.schema(self.schema))
                for above in stage.lineage
                for table in above.tables
            },
            own_tables=tuple(table.name for table in stage.tables),
            shards=[TarSource(SourceFile(str(self.shard)))],
            packed={form: f"packed/p.{form}" for form in self.packed},
            packed_format=stage.packed_format,
            packed_from="filtered_rows",
            plan=self.plan,
            materialize_mode=self.mode,
            schema=self.schema,
        )
        return replace(made, **changes)

    def outcomes(self, asset: str, **changes: Any) -> dict[str, Outcome]:
        """Runs the checks of an asset; by name.

        Those of packed files also with what packing collected of the rows, if these are as they were packed: the
        outcomes have to be the same.
        """
        context = self.context(asset, **changes)
        try:
            found = {outcome.name: outcome for outcome in run_checks(context)}
            rows = self.path("filtered_rows")
            is_as_packed = rows.exists() and rows.read_bytes() == self.packed_rows
            if context.packed_format and self.collected and context.plan is self.plan and is_as_packed:
                with PackedFiles(context, [context.packed_format], self.collected) as files:
                    assert {outcome.name: outcome for outcome in run_checks(context, files)} == found
            return found
        finally:
            for shard in context.shards:
                shard.file.close()

    def failed(self, asset: str, **changes: Any) -> set[str]:
        """Names of the checks that did not hold."""
        return {name for name, outcome in self.outcomes(asset, **changes).items() if not outcome.passed}

    def blocks(self, table: str) -> list[pa.Table]:
        """A table in blocks of whole samples."""
        return list(sample_groups(read_batches(pq.ParquetFile(self.path(table)), batch_bytes=BATCH), batch_bytes=BATCH))

    def pack(self, table: str = "filtered_rows", forms: Sequence[str] = ("mult", "mstr")) -> None:
        """Packs the current rows of the table."""
        folder = self.root / "packed"
        folder.mkdir(exist_ok=True)
        target = {form: folder / f"p.{form}" if form in forms else None for form in ("mult", "mstr")}
        collected = ExpectedRows(Placer(self.plan))
        pack_rows(
            self.blocks(table),
            self.plan,
            **target,
            provenance={"dataset": "d", "partition": "p"},
            packed=collected.add,
        )
        if table == "filtered_rows":
            self.collected, self.packed_rows = collected, self.path(table).read_bytes()


def publish_table(store: Store, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Writes a table of the partition ``p``."""
    with store.draft(f"{table}/p.parquet") as draft, ParquetSink(draft.path, schema) as sink:
        for batch in batches:
            sink.write(batch)


def build(
    folder: Path,
    members: Iterable[tuple[str, bytes]] = MEMBERS,
    *,
    pack: Any = "generic",
    mode: str = "read",
    is_whole: bool = True,
) -> Partition:
    """Runs the chain over a shard of these members; else no further than to the rows."""
    shard = write_tar(folder / "shard.tar", members)
    root = folder / "store"
    store = Store(str(root))
    with SourceFile(str(shard)) as source:
        layout = MemberRules()
        members = list(index_members(TarSource(source)))
        made_of = MemberRows([TarSource(source)])

        def rows_of(schema: DatasetSchema) -> RowStream:
            return made_of.rows(lambda: iter(members), layout=layout, schema=schema)

        texts = [text for batch in rows_of(DatasetSchema()) for text in batch.column("metadata_json").to_pylist()]
        objects = (parse_object(text).value for text in texts if text is not None)
        columns = columns_of(objects, layout, shown=str(shard))
        plan = choose_plan(rows_of(DatasetSchema(user_columns=columns)), pack=pack, where="test", columns=columns)
        schema = DatasetSchema(user_columns=columns, pack=plan.to_json())
        made = Partition(root=root, shard=shard, schema=schema, plan=plan, store=store, mode=mode)
        publish_table(store, "raw_shards", MEMBER_INDEX_SCHEMA, members)
        stream = rows_of(schema)
        publish_table(store, "rows", schema.row_schema(), stream)
        publish_table(store, "rejects", REJECTS_SCHEMA, stream.rejects().to_batches())
        if not is_whole:
            return made

        def fetch(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
            return MaterializeStream(batches, open_file=lambda _: source, allowed=lambda url: url == source.url)

        rows = read_batches(pq.ParquetFile(made.path("rows")), batch_bytes=BATCH)
        publish_table(store, "materialized_rows", schema.row_schema(), fetch(rows) if mode == "read" else rows)
        filtered = FilterStream(
            made.blocks("materialized_rows"),
            annotators=[],
            filters=[],
            schema=schema,
            packable=packable(plan),
            fetch=fetch if mode == "write" else None,
        )
        publish_table(store, "filtered_rows", schema.filtered_schema(), filtered)
        publish_table(store, "dropped", DROPPED_SCHEMA, filtered.take_dropped())
        publish_table(store, "undecodable", UNDECODABLE_SCHEMA, [])
    made.pack()
    return made


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Partition:
    """A good partition; not to be changed."""
    return build(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def partition(pristine: Partition, tmp_path: Path) -> Partition:
    """A copy of the good partition, to be spoiled."""
    root = tmp_path / "store"
    shutil.copytree(pristine.root, root)
    return replace(pristine, root=root, store=Store(str(root)))


@pytest.fixture(scope="session")
def make_partition() -> Callable[..., Partition]:
    """Runs the chain over other members."""
    return build
