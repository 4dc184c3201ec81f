"""Publication: markers, versioned manifests, the catalog of views, and cleaning up.

A marker is a partition's last file: it is written only when every stage's record is there, made from one another, with
the present configuration, and with every check passed. A manifest lists the partitions whose marker still matches their
records and files. Neither ever names a file that is not there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mm_assets.errors import SourceError
from mm_assets.etl.dataset_store import TABLES, DatasetStore, StageRecord, canonical_json
from mm_assets.etl.stages import PACKED_FORMATS
from mm_assets.storage import is_local

__all__ = [
    "CleanReport",
    "ManifestReport",
    "build_manifest",
    "clean",
    "is_published",
    "pending_partitions",
    "publish",
    "sql_connection",
]

_STAGES = ("raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mult", "packed_mstr")
_UPSTREAM = {
    "rows": ("raw_shards", "raw_shards"),
    "materialized_rows": ("rows", "rows"),
    "filtered_rows": ("materialized_rows", "materialized_rows"),
    "packed_mult": ("filtered_rows", "filtered_rows"),
    "packed_mstr": ("filtered_rows", "filtered_rows"),
}
_PACKED_NAME = re.compile(r"packed/[A-Za-z0-9._-]+\.[0-9a-f]{8}\.(mult|mstr)")


def _config_stage(stage: str) -> str:
    return "packed" if stage.startswith("packed") else stage


def _chain_faults(dataset: DatasetStore, records: Mapping[str, StageRecord]) -> list[str]:
    """Why the records of a partition are no whole: empty when they are."""
    faults = []
    schema = dataset.schema().digest
    for stage, record in records.items():
        failed = [outcome.name for outcome in record.outcomes if not outcome.passed]
        if failed:
            faults.append(f"{stage} failed its check {', '.join(failed)}")
        if record.config_digest != dataset.spec.digest(_config_stage(stage)):
            faults.append(f"{stage} was made with another configuration")
        if record.schema_digest != schema:
            faults.append(f"{stage} was made with another dataset schema")
        if stage in _UPSTREAM:
            above, table = _UPSTREAM[stage]
            if record.inputs.get(table) != records[above].files[table].sha256:
                faults.append(f"{stage} was made from another {table}")
    return faults


def publish(dataset: DatasetStore, key: str) -> dict[str, Any]:
    """Writes a partition's marker.

    Returns:
        The marker.

    Raises:
        SourceError: a stage has not run, a check failed, or the partition's files do not belong together.
    """
    records = {stage: dataset.record(stage, key) for stage in _STAGES}
    faults = _chain_faults(dataset, records)
    if faults:
        where = dataset.store.url_of(dataset.marker_name(key))
        raise SourceError(where, f"partition {key!r} is not fit to be published: {'; '.join(faults)}")
    marker = {
        "version": 1,
        "dataset": dataset.spec.name,
        "partition": key,
        "shards": dict(records["raw_shards"].inputs),
        "config_digest": dataset.spec.digest("packed"),
        "schema_digest": records["packed_mult"].schema_digest,
        "num_samples": records["packed_mult"].counts["samples"],
        "counts": {
            "members": records["raw_shards"].counts["members"],
            "rows": records["materialized_rows"].counts["rows"],
        },
        "files": {name: file.to_json() for record in records.values() for name, file in sorted(record.files.items())},
    }
    dataset.store.write_bytes(dataset.marker_name(key), canonical_json(marker, indent=1))
    return marker


def is_published(dataset: DatasetStore, key: str) -> bool:
    """Whether a partition's marker stands for its present shards, configuration and schema."""
    marker = dataset.marker(key)
    return marker is not None and not _stale(dataset, key, marker)


def _stale(dataset: DatasetStore, key: str, marker: Mapping[str, Any]) -> str | None:
    partition = dataset.partitions().get(key)
    if partition is None:
        return "its shards are gone"
    if marker.get("shards") != {shard.url: shard.fingerprint for shard in partition.shards}:
        return "its shards changed"
    if marker.get("config_digest") != dataset.spec.digest("packed"):
        return "it was made with another configuration"
    if marker.get("schema_digest") != dataset.schema().digest:
        return "it was made with another dataset schema"
    return None


def pending_partitions(dataset: DatasetStore) -> list[str]:
    """Registered partitions without an up-to-date marker, sorted."""
    partitions = dataset.partitions()
    if not partitions:
        return []
    markers = dataset.markers()
    config, schema = dataset.spec.digest("packed"), dataset.schema().digest
    pending = []
    for key, partition in partitions.items():
        marker = markers.get(key)
        expected = {
            "shards": {shard.url: shard.fingerprint for shard in partition.shards},
            "config_digest": config,
            "schema_digest": schema,
        }
        if marker is None or any(marker.get(name) != value for name, value in expected.items()):
            pending.append(key)
    return sorted(pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport:
    """A dataset version as built.

    Attributes:
        digest: SHA-256 of the manifest, hexadecimal: its name below ``manifests/``.
        manifest: its content.
        url: where the copy of the newest stands.
        left_out: partitions that are not in it, with the reason.
    """

    digest: str
    manifest: Mapping[str, Any]
    url: str
    left_out: Mapping[str, str]


def build_manifest(dataset: DatasetStore) -> ManifestReport:
    """Lists the published partitions whose marker matches their shards, records and files, as a new dataset version.

    Raises:
        SourceError: the dataset is not registered, or the storage could not be read.
    """
    store = dataset.store
    schema = dataset.schema()
    partitions = dataset.partitions()
    markers = dataset.markers()
    sizes = {name: size for folder in (*TABLES, "packed") for name, size in store.sizes(folder).items()}
    config = dataset.spec.digest("packed")
    shards: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for key in sorted(set(partitions) | set(markers)):
        marker = markers.get(key)
        if marker is None:
            left_out[key] = "it is not published"
            continue
        fault = _marker_fault(dataset, key, marker, sizes, config=config, schema=schema.digest, known=key in partitions)
        if fault:
            left_out[key] = fault
            continue
        shards.append(
            {
                "partition": key,
                "num_samples": marker["num_samples"],
                "files": {form: marker["files"][form] for form in PACKED_FORMATS},
            }
        )
    manifest = {
        "version": 1,
        "dataset": dataset.spec.name,
        "schema": schema.to_json(),
        "num_samples": sum(shard["num_samples"] for shard in shards),
        "shards": shards,
    }
    content = canonical_json(manifest, indent=1)
    digest = hashlib.sha256(content).hexdigest()
    if not store.exists(f"manifests/{digest}.json"):
        store.write_bytes(f"manifests/{digest}.json", content)
    store.write_bytes("catalog.sql", _catalog(dataset).encode())
    store.write_bytes("manifest.json", content)
    return ManifestReport(digest=digest, manifest=manifest, url=store.url_of("manifest.json"), left_out=left_out)


def _marker_fault(
    dataset: DatasetStore,
    key: str,
    marker: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    config: str,
    schema: str,
    known: bool,
) -> str | None:
    if not known:
        return "its shards are gone"
    if marker.get("config_digest") != config or marker.get("schema_digest") != schema:
        return _stale(dataset, key, marker)
    for name, file in marker["files"].items():
        found = sizes.get(file["path"])
        if found != file["size"]:
            return f"{file['path']} is {'gone' if found is None else f'{found} bytes'}, published with {file['size']}"
        record = dataset.record(_stage_of(name), key)
        if record.files[name].sha256 != file["sha256"]:
            return f"{record.stage} has been made again since it was published"
    return None


def _stage_of(file_name: str) -> str:
    if file_name in PACKED_FORMATS:
        return f"packed_{file_name}"
    return {"rejects": "rows", "dropped": "filtered_rows"}.get(file_name, file_name)


def _catalog(dataset: DatasetStore) -> str:
    lines = [
        "-- Views over every partition of this dataset. Say first where this file stands, without a final slash:",
        f"-- set variable root = '{dataset.spec.name}';",
    ]
    for table in TABLES:
        lines.append(
            f"create or replace view {table} as select *, parse_filename(filename, true) as partition "
            f"from read_parquet(getvariable('root') || '/{table}/*.parquet', filename = true);"
        )
    return "\n".join(lines) + "\n"


def sql_connection(dataset: DatasetStore) -> Any:
    """A DuckDB connection with the catalog's views open.

    Raises:
        SourceError: no partition has been made yet.
    """
    import duckdb

    connection = duckdb.connect()
    root = dataset.store.path_of("")
    if not is_local(dataset.store.url):
        connection.register_filesystem(dataset.store.fs)
        root = dataset.store.url
    connection.execute("set variable root = ?", [root])
    for statement in _catalog(dataset).split(";\n"):
        view = re.search(r"create or replace view (\w+)", statement)
        if view and dataset.store.sizes(view[1]):
            connection.execute(statement)
    return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """What cleaning removed.

    Attributes:
        files: names relative to the dataset's folder.
        num_bytes: their size.
        manifests: digests of the manifests that were kept.
    """

    files: tuple[str, ...]
    num_bytes: int
    manifests: tuple[str, ...]


def clean(dataset: DatasetStore, *, keep: int | None = None, dry_run: bool = False) -> CleanReport:
    """Removes packed files and manifests that no kept manifest and no marker needs.

    Args:
        dataset: the dataset's folder.
        keep: manifests to keep, the newest among them; None takes the declaration's.
        dry_run: report only.

    Raises:
        SourceError: the storage could not be read.
    """
    store = dataset.store
    keep = dataset.spec.keep_manifests if keep is None else keep
    names = sorted(_newest_first(store, "manifests"))
    newest = store.read_bytes("manifest.json") if store.exists("manifest.json") else b""
    current = f"manifests/{hashlib.sha256(newest).hexdigest()}.json"
    ordered = [current] if current in {name for _, name in names} else []
    ordered += [name for _, name in names if name != current]
    kept = ordered[: max(keep, 1)]
    needed = {path for name in kept for path in _packed_of(json.loads(store.read_bytes(name)))}
    needed |= {file["path"] for marker in dataset.markers().values() for file in marker["files"].values()}
    sizes = {**store.sizes("packed"), **store.sizes("manifests")}
    doomed = [name for name in sizes if _PACKED_NAME.fullmatch(name) and name not in needed]
    doomed += ordered[max(keep, 1) :]
    if not dry_run:
        for name in doomed:
            store.delete(name)
    return CleanReport(
        files=tuple(doomed),
        num_bytes=sum(sizes[name] for name in doomed),
        manifests=tuple(name.rsplit("/", 1)[-1].removesuffix(".json") for name in kept),
    )


def _newest_first(store: Any, folder: str) -> Iterable[tuple[float, str]]:
    for name in store.sizes(folder):
        info = store.fs.info(store.path_of(name))
        when = info.get("mtime") or info.get("LastModified") or info.get("created") or 0
        yield -(when.timestamp() if hasattr(when, "timestamp") else float(when)), name


def _packed_of(manifest: Mapping[str, Any]) -> list[str]:
    return [file["path"] for shard in manifest["shards"] for file in shard["files"].values()]
