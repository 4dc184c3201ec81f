"""docs/sources.md and pages of docs/spec agree with the code and with the files that it makes."""

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.fields import SequenceField, TextField
from mm_assets.formats import crc32c, open_reader
from mm_assets.packing.judge import MAX_SAMPLE_BYTES
from mm_assets.packing.plan import Take
from mm_assets.packing.presets import PRESETS, check_pack_config, choose_plan
from mm_assets.packing.survey import MAX_GROUPS
from mm_assets.pipeline.chain import PUBLISHED, TABLES
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.exports import export_partition
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt, StageFailure
from mm_assets.pipeline.state.registration import group_shards, register
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.from_listing import ListingRows
from mm_assets.rows.schema import DROPPED_SCHEMA, REJECTS_SCHEMA, DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.source_ref import parse_source_ref
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, MODALITY_OF_EXTENSION
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import Listing, ShardFile

from ..pipeline.chain import at_work

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
PACKING, FILES, PIPELINE, SOURCES, FORMAT = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("spec/packing", "spec/files", "spec/pipeline", "sources", "spec/format")
)


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next of its level or above."""
    level = heading.split(" ")[0]
    below = page.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{2,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def cells(text: str) -> list[list[str]]:
    """The rows of all tables in a text, without heads and rules."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, row in enumerate(rows) if row[0] and set(row[0]) <= {"-", ":"}}
    return [row for number, row in enumerate(rows) if number not in heads and number - 1 not in heads]


def codes(text: str) -> set[str]:
    """Everything in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def make(root: Path, name: str, shards: Path, **settings: object) -> DatasetStore:
    """A dataset of one folder of shards, taken through every stage."""
    config = {"name": name, "shards": str(shards), "root": str(root), "settle_seconds": 0, **settings}
    dataset = DatasetStore(DatasetSpec.from_config(config, where="test"))
    for partition in register(dataset).partitions:
        for stage in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows):
            at_work(stage, dataset, partition.key)
        at_work(stages.packed, dataset, partition.key)
        at_work(publish.publish, dataset, partition.key)
    manifests.build_manifest(dataset)
    return dataset


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory, demo_shards: Path) -> Iterator[Path]:
    """The folder of the demo captions as a dataset, with every kind of file; a filter drops some images."""
    root = tmp_path_factory.mktemp("docs") / "data"
    filters = [{"type": "aspect_ratio", "min": 0.5, "max": 1.5}]
    exports = [{"format": "webdataset", "out": str(root.parent / "tars")}]
    dataset = make(root, "captions", demo_shards / "captions-00000.tar", filters=filters, exports=exports)
    for entry in DatasetState(dataset).published().values():
        export_partition(dataset, dataset.spec.exports[0], entry)
    clean(dataset)
    failure = StageFailure(partition="captions-00000", stage="rows", detail="a fault", path="captions-00000.tar")
    dataset.write_attempt(Attempt(partition="captions-00000", stages={}, failure=failure))
    with Claims(dataset, "a-load") as claims:
        claims.take(None)
        yield root / "captions"


# -- spec/packing.md


def test_the_complete_pack_example_is_allowed() -> None:
    """The YAML of docs/spec/packing.md passes the check of declarations and gives the packed modalities it names."""
    example, columns, composites = blocks(PACKING, "yaml")
    check_pack_config(yaml.safe_load(columns)["pack"], where="docs/spec/packing.md")
    check_pack_config(yaml.safe_load(composites)["pack"], where="docs/spec/packing.md")
    spec = DatasetSpec.from_config(yaml.safe_load(example), where="docs/spec/packing.md")
    check_pack_config(spec.pack, where="docs/spec/packing.md")
    plan = choose_plan([], pack=spec.pack, where="docs/spec/packing.md")
    fields = plan.fields()
    assert list(fields) == ["camera", "state", "reward", "views", "others", "index", "info"]
    assert isinstance(fields["views"], SequenceField)
    assert {m.selector.take for m in plan.modalities} | {"json", "column", "parts", "shared"} == set(get_args(Take))


def test_the_fixed_presets_are_as_documented() -> None:
    """The table of presets has the packed modalities of each preset in order, with their fields."""
    found: dict[str, list[tuple[str, str]]] = {}
    preset = ""
    for first, name, kind, _ in cells(section(PACKING, "## Presets")):
        preset = first.strip("`") or preset
        found.setdefault(preset, []).append((name.strip("`"), kind))
    assert tuple(found) == PRESETS
    for preset in PRESETS:
        expected = []
        for name, value in choose_plan([], pack=preset, where="test").fields().items():
            kind = type(value).__name__
            inner = f" of {type(value.inner).__name__}" if isinstance(value, SequenceField) else ""
            expected.append((name, kind + inner))
        documented = found[preset][1:] if preset in ("robotics", "generic") else found[preset]  # discovered names
        assert documented == expected, preset


def test_keys_and_takes_of_pack_are_as_documented() -> None:
    """The tables of `pack` name exactly the keys and values that are taken."""
    part = section(PACKING, "## The key `pack`")
    with pytest.raises(ConfigError) as refused:
        check_pack_config({"fields": [{"no such key": 1}]}, where="test")
    keys = str(refused.value).split("allowed: ")[1].split(", ")
    first = [row[0].strip("`") for row in cells(part)]
    assert first[: 3 + len(keys)] == ["preset", "fields", "columns", *keys]
    assert sorted(first[3 + len(keys) :]) == sorted(get_args(Take))


def test_limits_of_packing_are_as_documented() -> None:
    """The numbers of docs/spec/packing.md are those of the code."""
    assert f"{MAX_SAMPLE_BYTES:,} bytes" in PACKING
    assert f"At most {MAX_GROUPS} groups" in PACKING


def test_rest_rows_and_metadata_hold_what_is_documented(tmp_path: Path, demo_shards: Path) -> None:
    """The listing has the documented keys, equals the printed example, and its entries have the positions of `rest`."""
    part = section(PACKING, "## What `rest`, `rows` and `metadata` hold")
    documented = {row[0].strip("`") for row in cells(part)}
    make(tmp_path, "video", demo_shards / "video-00000.tar")
    with mm_assets.open(tmp_path / "video" / "manifest.json") as video:
        (example,) = blocks(part, "json")
        assert video[0]["rows"] == json.loads(example)
        assert video[0]["rest"] is None
    listing = {"preset": "interleaved", "fields": [
        {"name": "rows", "field": "JSONField", "take": "listing"},
        {"name": "first", "field": "TextField", "modality": "text"},
        {"name": "rest", "field": "SequenceField", "config": {"inner": {"type": "BytesField"}}, "take": "rest"},
        {"name": "text", "field": "TextField", "modality": "none"},
        {"name": "image", "field": "TextField", "modality": "none"},
    ]}  # fmt: skip
    make(tmp_path, "docs", demo_shards / "docs-00001.tar", pack=listing)
    with mm_assets.open(tmp_path / "docs" / "manifest.json") as docs:
        for sample in docs:
            assert {key for entry in sample["rows"] for key in entry} == documented - {"part", "refused_by"}
            assert [k for k, _ in sample["rest"]] == [k for k, e in enumerate(sample["rows"]) if e["in"] == "rest"]


def test_a_kept_error_is_dropped_as_not_materialized(tmp_path: Path) -> None:
    """With `on_materialize_error: keep` a row without content is in `dropped` for the documented reason."""
    (tmp_path / "list.jsonl").write_text(
        '{"sample_id": "a", "path": "gone.png"}\n{"sample_id": "a", "text_content": "here"}\n'
    )
    dataset = make(tmp_path / "out", "listed", tmp_path / "list.jsonl", pack="image_text")
    (table,) = mm_assets.tables(dataset.store.url, "dropped")
    (dropped,) = pq.read_table(table).to_pylist()
    assert (dropped["modality"], dropped["filter"], dropped["reason"]) == ("image", "packable", "not_materialized")
    assert "`not_materialized`" in PACKING


def test_the_source_digest_is_as_documented(tmp_path: Path, demo_shards: Path) -> None:
    """The digest made from the filtered rows by the words of docs/spec/packing.md is that in both packed files."""
    dataset = make(tmp_path, "docs", demo_shards / "docs-00001.tar")
    lines = []
    (table,) = mm_assets.tables(dataset.store.url, "filtered_rows")
    for row in pq.read_table(table).to_pylist():
        content = row["binary_content"]
        if content is None:
            text = row["metadata_json"] if row["modality"] == "metadata" else row["text_content"]
            content = text.encode()
        ref = parse_source_ref(row["source_ref"])
        frame = "" if ref.frame_index is None else f"#{ref.frame_index}"
        lines.append(f"{ref.member or ''}{frame}\t{len(content)}\t{crc32c(content):08x}\n".encode())
    assert any(b"#" in line for line in lines)
    expected = hashlib.sha256(b"".join(sorted(lines))).hexdigest()
    keys = {row[0].strip("`") for row in cells(section(PACKING, "## Provenance"))}
    for form in ("mult", "mstr"):
        (packed,) = (tmp_path / "docs" / "packed").glob(f"*.{form}")
        with open_reader(packed) as reader:
            provenance = reader.schema["provenance"]
        assert provenance["source_digest"] == expected
        assert set(provenance) == keys


# -- files.md


_DATA = ("stages", "config", "settings", "losses", "of partitions", "reasons", "made_with", "tables", "streams")
_BELOW = {"of partitions": "losses", "losses": "reasons"}  # objects whose keys are data, and what their values are


def json_keys(value: object, name: str) -> Iterator[str]:
    """Every key below a value but data: partitions, shards, stages and reasons, modalities, settings of fields."""
    if isinstance(value, list):
        for item in value:
            yield from json_keys(item, name)
    elif isinstance(value, dict):
        data = (
            name in _DATA
            or (
                name == "partitions" and "recipe" not in value  # which are the columns of a manifest
            )
            or (name in ("shards", "inputs") and any("/" in key for key in value))
        )
        for key, inner in value.items():
            if not data and not key.startswith(("present_", "dropped.")):
                yield key
            if name not in ("config", "settings"):
                is_by_partition = name == "partitions" and key == "losses"
                yield from json_keys(inner, "of partitions" if is_by_partition else _BELOW.get(name, key))


def test_every_key_of_the_json_files_is_documented(captions: Path) -> None:
    """Each key in each JSON file of a dataset is in the section on that file."""
    common = codes(section(FILES, "## Files and shards")) | {"path", "sha256", "size"}
    records = "## Records"
    manifest = ["## manifest.json and manifests/&lt;digest&gt;.json", "## schema.json", records]
    sections = {
        "manifest.json": manifest,
        "manifests": manifest,
        "schema.json": ["## schema.json"],
        "shards.json": ["## shards.json"],
        "records": [records],
        "exports": ["## Records of exports"],
        "attempts": ["## Attempts"],
        "claims": ["## Claims"],
        "clean.json": ["## clean.json and cache"],
    }
    seen = set()
    for path in sorted(captions.rglob("*.json")):
        kind = path.relative_to(captions).parts[0]
        seen.add(kind)
        named = set(common)
        for heading in sections[kind]:
            named |= {part for code in codes(section(FILES, heading)) for part in re.split(r"[.\[\]…]+", code)}
        keys = set(json_keys(json.loads(path.read_bytes()), ""))
        assert keys, path
        assert keys - named == set(), path
    assert seen == set(sections)


def test_every_key_of_the_lists_of_writers_is_documented(tmp_path: Path) -> None:
    """The section on folders that Python wrote has each key of their lists and of their modalities."""
    with mm_assets.create(tmp_path, {"text": TextField()}) as writer:
        writer.write("a", {"text": "a"})
    document = json.loads((tmp_path / "writer-00000-of-00001.json").read_bytes())
    named = {code.removesuffix("[]") for code in codes(section(FILES, "## Folders of `mm_assets.create`"))}
    assert {*document, *document["modalities"][0]} <= named


def test_the_examples_of_the_json_files_have_only_real_keys(captions: Path) -> None:
    """Each key in a printed example is one that the pipeline writes."""
    real = {key for path in captions.rglob("*.json") for key in json_keys(json.loads(path.read_bytes()), "")}
    examples = [json.loads(block) for block in blocks(FILES, "json")]
    assert len(examples) == 5
    assert {key for example in examples for key in json_keys(example, "")} - real == {"…"}


@pytest.mark.parametrize(
    ("table", "schema"),
    [("raw_shards", MEMBER_INDEX_SCHEMA), ("rejects", REJECTS_SCHEMA), ("dropped", DROPPED_SCHEMA)],
)
def test_columns_of_tables_are_as_documented(table: str, schema: pa.Schema) -> None:
    """The tables of columns have those of the code in order, with type and nullability."""
    rows = [row for row in cells(section(FILES, f"### `{table}`")) if len(row) == 4]
    expected = [[f"`{f.name}`", str(f.type), "yes" if f.nullable else "no"] for f in schema]
    assert [row[:3] for row in rows] == expected


def test_every_reason_of_a_reject_is_documented() -> None:
    """The table of reasons has exactly the reasons that the code of the stage can give."""
    documented = {
        code for stage, reason, _ in (r for r in cells(section(FILES, "### `rejects`")) if len(r) == 3)
        for code in codes(reason) if stage == "`rows`"
    }  # fmt: skip
    source = "".join((REPO / "mm_assets" / name).read_text() for name in (
        "rows/from_members.py", "rows/from_listing.py", "rows/interleaved.py", "sources/text_members.py",
    ))  # fmt: skip
    found = re.findall(r'BadTextError\("(\w+)"', source)
    found += re.findall(r'_reject(?:_member)?\((?:number|member|json_member), "(\w+)"', source)
    found += re.findall(r'problems\.append\(\("(\w+)"', source)
    source = "".join((REPO / "mm_assets" / "media" / name).read_text() for name in ("pdf.py", "pdf_worker.py"))
    found += re.findall(r'(?:kind=|RefusedError\()"(\w+)"', source)
    found += ["no_text"]  # written as part of a conditional expression
    assert documented == set(found)


def test_the_catalog_example_runs(
    captions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python example opens the views of a dataset, and each table has one."""
    (example,) = blocks(FILES, "python")
    monkeypatch.chdir(captions.parent.parent)
    space: dict[str, Any] = {}
    exec(compile(example, "docs/spec/files.md", "exec"), space)
    assert "captions-00000" in capsys.readouterr().out
    for table in (*TABLES, PUBLISHED.name):
        space["connection"].execute(f"select partition from {table}")


@pytest.mark.parametrize("library", ["pyarrow", "duckdb", "daft"])
def test_other_programs_find_the_media_in_the_shards(
    library: str, captions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples read every image from the user's own tar, each with one library and none with this project."""
    pytest.importorskip(library, reason="is not a dependency")
    viewer = (DOCS / "spec" / "viewer.md").read_text(encoding="utf-8")
    first, *examples = blocks(section(viewer, "## Media without mm-assets"), "python")
    (example,) = (code for code in examples if re.search(rf"^(import|from) {library}\b", code, re.MULTILINE))
    assert "mm_assets" not in first + example
    monkeypatch.chdir(captions.parent.parent)
    space: dict[str, Any] = {}
    exec(compile(first, "docs/spec/viewer.md", "exec"), space)
    rows = pq.read_table(space["tables"], filters=pc.field("modality") == "image")
    exec(compile(example, "docs/spec/viewer.md", "exec"), space)
    contents = dict(zip(rows["sample_id"].to_pylist(), rows["binary_content"].to_pylist(), strict=True))
    assert len(contents) > 20
    assert space["images"] == contents


def test_packed_files_are_named_by_their_digest(captions: Path) -> None:
    """The digits in a packed file's name are the first 16 of its SHA-256."""
    packed = sorted((captions / "packed").iterdir())
    assert len(packed) == 2
    for path in packed:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.name == f"captions-00000.{digest[:16]}{path.suffix}"


def _sections(data: bytes, trailer: int) -> dict[int, bytes]:
    ptr, size = struct.unpack_from("<QQ", data, trailer)
    entries = (struct.unpack_from("<IIQQ", data, ptr + at) for at in range(8, size, 24))
    return {kind: data[at : at + length] for kind, _, at, length in entries}


def test_a_reader_of_other_making_gets_from_the_manifest_to_payloads(captions: Path) -> None:
    """The steps for readers in other languages lead from manifest.json to the same checked payloads in both formats."""
    manifest = json.loads((captions / "manifest.json").read_bytes())
    columns = manifest["partitions"]
    (key,), (number,) = columns["key"], columns["num_samples"]
    names = {form: f"{key}.{columns['packed'][form]['sha256'][0][:16]}.{form}" for form in ("mult", "mstr")}
    files = {form: (captions / "packed" / name).read_bytes() for form, name in names.items()}
    mult, mstr = _sections(files["mult"], len(files["mult"]) - 32), _sections(files["mstr"], 4064)
    texts: dict[str, list[bytes]] = {"mult": [], "mstr": []}
    names = [modality["name"] for modality in json.loads(mult[1])["modalities"]]
    modality = names.index("text")
    record = json.loads(mult[1])["modalities"][modality]["metadata_size"]
    column = 16 * number * modality
    for k in range(number):
        (at,) = struct.unpack_from("<Q", mult[3], column + 8 * k)
        (size,) = struct.unpack_from("<I", mult[3], column + 8 * number + 4 * k)
        (checksum,) = struct.unpack_from("<I", mult[3], column + 12 * number + 4 * k)
        payload = files["mult"][at : at + size]
        assert crc32c(payload) == checksum
        texts["mult"].append(payload[record:])
        table, width = struct.unpack_from("<QI", files["mstr"], 9 + 40 * modality + 8)
        at, size, checksum = struct.unpack_from("<QII", files["mstr"], table + width * k)
        head = files["mstr"][table + width * k + 16 : table + width * (k + 1)]
        data = files["mstr"][at : at + size]
        assert crc32c(head + data) == checksum
        texts["mstr"].append(data)
    with mm_assets.open(captions / "manifest.json") as docs:
        expected = [sample["text"].encode() for sample in docs]
    assert texts == {"mult": expected, "mstr": expected}
    assert mult[2] == mstr[2]


# -- spec/pipeline.md and spec/format.md


def test_the_table_of_extensions_is_that_of_the_code() -> None:
    """Each extension is listed with its row modality."""
    rows = [row for row in cells(section(PIPELINE, "## Sample layout").split("### ")[0]) if len(row) == 2]
    found = {extension: row[0].strip("`") for row in rows[:-1] for extension in row[1].split()}
    assert found == dict(MODALITY_OF_EXTENSION)


def test_the_example_of_a_list_gives_its_rows(tmp_path: Path) -> None:
    """The printed list makes the rows that its columns are said to make, without a reject."""
    part = section(SOURCES, "## Lists of files")
    (example,) = blocks(part, "json")
    (tmp_path / "list.jsonl").write_text(example)
    schema = DatasetSchema(user_columns=(UserColumn(name="language", source="language", type="string", rows=""),))
    with SourceFile(str(tmp_path / "list.jsonl")) as source:
        stream = ListingRows(source).rows(lambda: iter(()), layout=MemberRules(), schema=schema)
        rows = [row for batch in stream for row in batch.to_pylist()]
        assert stream.rejects().num_rows == 0
    assert [(r["sample_id"], r["position"], r["modality"], r["language"]) for r in rows] == [
        ("moon", -1, "metadata", None), ("moon", 0, "image", "en"), ("moon", 1, "text", None),
        ("star", -1, "metadata", None), ("star", 4, "image", None),
    ]  # fmt: skip


def test_the_examples_of_partition_patterns_group_as_printed() -> None:
    """Both patterns of the page give the keys in their comments."""
    (example,) = blocks(section(PIPELINE, "### Groups of shards"), "yaml")
    patterns = re.findall(r"partition_pattern: '(.*?)'", example)
    keys = []
    for pattern in patterns:
        config = {**yaml.safe_load(example), "partition_pattern": pattern, "name": "x", "root": "r"}
        spec = DatasetSpec.from_config(config, where="docs")
        shard = ShardFile(url="s3://bucket/web/en/part-0001-00.tar", size=1, fingerprint="1", modified=None)
        listing = Listing(shards=(shard,), folder="s3://bucket/web/")
        keys += [partition.key for partition in group_shards(spec, listing).partitions]
    assert keys == ["en", "part-0001"]


def test_the_check_value_is_that_of_the_code() -> None:
    """The check value of CRC-32C in docs/spec/format.md is what the code computes."""
    (value,) = re.findall(r"`123456789` give 0x([0-9A-F]{8})", FORMAT)
    assert crc32c(b"123456789") == int(value, 16)


def test_the_tests_that_show_the_promises_are_there() -> None:
    """Every test that docs/spec/reliability.md names is a file of the suite, and every function is in it."""
    page = (REPO / "docs" / "spec" / "reliability.md").read_text()
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 15
    for file, function in named:
        text = (REPO / "tests" / file).read_text()
        assert not function or f"def {function}(" in text, f"{file}::{function}"
