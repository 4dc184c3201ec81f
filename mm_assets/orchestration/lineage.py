"""What the definition of an asset has about its data: columns, where each comes from, and where the files are.

Nothing is asked of a store behind a URL: definitions are loaded by every process of Dagster.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg

from mm_assets.dataset.vector_index import INDEXES
from mm_assets.errors import MmAssetsError, masked_urls
from mm_assets.orchestration.partitions import asset_key, shard_partitions, shards_key
from mm_assets.orchestration.viewer import viewer_link
from mm_assets.packing.plan import PackedModality, PackPlan
from mm_assets.pipeline.chain import (
    FILTERED_ROWS,
    MANIFEST,
    MATERIALIZED_ROWS,
    PACKED_FOLDER,
    PUBLISHED,
    RAW_SHARDS,
    ROWS,
    Stage,
    packed_stages,
)
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.exports import records_folder
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore
from mm_assets.rows.schema import COLUMN_DESCRIPTIONS, DatasetSchema, UserColumn
from mm_assets.rows.user_columns import ColumnTally
from mm_assets.storage.urls import is_local, local_path

__all__ = ["copy_schema", "described_data", "modality_columns", "shards_asset"]

_STORES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_SHARDS = "The shards that the dataset is made of. Nothing here writes them; a partition is one of them, or a group."
_MAX_COLUMNS = 200  # of a dataset's own
_CONTENT = {"text": "text_content", "metadata": "metadata_json"}  # of a row's modality; else its bytes


def described_data(spec: DatasetSpec, stage: Stage) -> tuple[dict[str, Any], dict[str, str]]:
    """Metadata and tags of an asset: its place, its table's name in SQL, its columns and their origin."""
    schema = _schema(spec)
    metadata: dict[str, Any] = {"dagster/uri": masked_urls(_url(spec, stage))}
    if link := viewer_link(spec.name):
        metadata["viewer"] = dg.MetadataValue.md(f"[samples]({link})")
    if stage.tables:
        metadata["dagster/table_name"] = f"{spec.name}.{stage.tables[0].name}"
        metadata["dagster/column_schema"] = _columns(spec, stage, schema)
    elif (
        stage is not PUBLISHED
        and MANIFEST not in stage.upstream
        and schema is not None
        and (columns := modality_columns(spec, schema.pack))
    ):
        metadata["dagster/column_schema"] = columns
    if lineage := _lineage(spec, stage, schema):
        metadata["dagster/column_lineage"] = dg.TableColumnLineage(lineage)
    scheme = "local" if is_local(spec.root) else spec.root.split("://", 1)[0].lower()
    return metadata, {"dagster/storage_kind": _STORES.get(scheme, scheme)}


def shards_asset(spec: DatasetSpec) -> dg.AssetSpec:
    """The shards of a dataset, which come from elsewhere: the keys of their JSON are its columns."""
    columns = [
        dg.TableColumn(name=column.source, type=str(column.arrow_type), description="key of the samples' JSON")
        for column in _json_columns(spec, _schema(spec))
    ]
    scheme = "local" if is_local(spec.shards) else spec.shards.split("://", 1)[0].lower()
    return dg.AssetSpec(
        key=shards_key(spec),
        description="\n\n".join(filter(None, (_SHARDS, spec.description))),
        group_name=spec.name,
        owners=list(spec.owners),
        kinds={"tar" if spec.source is None else spec.source.rpartition(":")[2].lower()},
        partitions_def=shard_partitions(spec),
        metadata={
            "dagster/uri": masked_urls(spec.shards),
            **({"dagster/column_schema": dg.TableSchema(columns=columns)} if columns else {}),
        },
        tags={**spec.tags, "dagster/storage_kind": _STORES.get(scheme, scheme)},
    )


def _url(spec: DatasetSpec, stage: Stage) -> str:
    """The folder or file that has what a stage makes."""
    place = PACKED_FOLDER if stage.packed_format else stage.name
    if stage is MANIFEST:
        place = "manifest.json"
    elif stage is PUBLISHED:
        place = RECORDS
    if not stage.is_partitioned and stage is not MANIFEST:
        place = INDEXES
    for options in spec.exports:
        if options.asset == stage.name:
            if options.out is not None:
                return options.out
            place = records_folder(options)
    return f"{spec.root.rstrip('/')}/{spec.name}/{place}"


def copy_schema(spec: DatasetSpec, *, has_changed: bool) -> None:
    """Copies what registration has decided to $DAGSTER_HOME, of a remote root: definitions load without requests.

    Args:
        spec: the declaration.
        has_changed: whether a copy that is there may be of an earlier decision.
    """
    path = _schema_path(spec)
    if path is None or is_local(spec.root) or (path.exists() and not has_changed):
        return
    with suppress(MmAssetsError, OSError):  # columns are then those of the copy, or the declared ones
        content = DatasetStore(spec).store.read_bytes("schema.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(content)
        draft.replace(path)


def _schema_path(spec: DatasetSpec) -> Path | None:
    """Where on this machine the dataset's schema is, or a copy of it."""
    if is_local(spec.root):
        return local_path(spec.root) / spec.name / "schema.json"
    home = os.environ.get("DAGSTER_HOME")
    root = hashlib.sha256(spec.root.encode()).hexdigest()[:12]
    return None if home is None else Path(home) / "mm_assets" / "schemas" / f"{spec.name}-{root}.json"


def _schema(spec: DatasetSpec) -> DatasetSchema | None:
    """What registration has decided, where that is on this machine; the declared columns are known without it."""
    path = _schema_path(spec)
    if path is None:
        return None
    with suppress(OSError, ValueError, AttributeError, MmAssetsError):  # a damaged one is an error of each run
        return DatasetSchema.from_json(json.loads(path.read_bytes()), where=str(path))
    return None


def _json_columns(spec: DatasetSpec, schema: DatasetSchema | None) -> Sequence[UserColumn]:
    """The columns that keys of the samples' JSON fill: as decided, else as declared, then of unknown type."""
    if schema is not None:
        return schema.user_columns[:_MAX_COLUMNS]
    annotated = [column.name for column in _annotator_columns(spec)]
    return ColumnTally(spec.samples).columns(shown=spec.where, taken=annotated)[:_MAX_COLUMNS]


def _annotator_columns(spec: DatasetSpec) -> Sequence[UserColumn]:
    return [column for annotator in spec.build_annotators() for column in annotator.columns]


def _columns(spec: DatasetSpec, stage: Stage, schema: DatasetSchema | None) -> dg.TableSchema:
    """The columns of the main table of a stage, those of the dataset where they are known."""
    columns = [
        dg.TableColumn(
            name=field.name,
            type=str(field.type),
            description=COLUMN_DESCRIPTIONS.get(field.name),
            constraints=dg.TableColumnConstraints(nullable=field.nullable),
        )
        for field in stage.tables[0].schema(DatasetSchema())
    ]
    if stage is not RAW_SHARDS:
        for column in _json_columns(spec, schema):
            about = f"key `{column.source}` of the sample's JSON, on its {column.rows or 'content'} rows"
            columns.append(dg.TableColumn(name=column.name, type=str(column.arrow_type), description=about))
    if stage is FILTERED_ROWS:
        for column in _annotator_columns(spec):
            measured = _CONTENT.get(column.rows, "binary_content")
            about = f"measured by an annotator in `{measured}`, on {column.rows or 'content'} rows"
            columns.append(dg.TableColumn(name=column.name, type=str(column.arrow_type), description=about))
    return dg.TableSchema(columns=columns)


def modality_columns(spec: DatasetSpec, pack: Mapping[str, Any]) -> dg.TableSchema | None:
    """The modalities of a plan as columns: what a sample of the product has."""
    plan = _plan(spec, pack)
    if plan is None or not plan.modalities:
        return None
    columns = [
        dg.TableColumn(
            name=modality.name,
            type=modality.field_type.rpartition(":")[2],
            description=f"packed from `{'`, `'.join(_packed_from(modality))}` of the filtered rows",
        )
        for modality in plan.modalities
    ]
    return dg.TableSchema(columns=columns)


def _packed_from(modality: PackedModality) -> Sequence[str]:
    """The columns of the filtered rows that a packed modality is made of."""
    names: dict[str, None] = {}
    for selector in modality.selectors.values():
        if selector.take in ("json", "metadata"):
            names["metadata_json"] = None
        elif selector.take == "column":
            names |= dict.fromkeys(selector.key)
        elif selector.take == "listing":
            names |= dict.fromkeys(("position", "modality", "content_type"))
        else:
            kinds = ("text", "") if selector.modality == "*" else (selector.modality,)
            names |= dict.fromkeys(_CONTENT.get(kind, "binary_content") for kind in kinds)
    return tuple(names)


def _plan(spec: DatasetSpec, pack: Mapping[str, Any]) -> PackPlan | None:
    with suppress(MmAssetsError):  # of another release
        return PackPlan.from_json(pack, where="schema.json", declared=spec.pack)
    return None


def _lineage(spec: DatasetSpec, stage: Stage, schema: DatasetSchema | None) -> dict[str, list[dg.TableColumnDep]]:
    if stage.tables:
        return dict(_of_table(spec, stage, schema))
    plan = None if schema is None else _plan(spec, schema.pack)
    if plan is None:
        return {}
    if stage is MANIFEST:
        packed = [asset_key(spec, made) for made in packed_stages(spec).values()]
        return {m.name: [dg.TableColumnDep(key, m.name) for key in packed] for m in plan.modalities}
    if stage.packed_format is None:
        return {}
    rows = asset_key(spec, FILTERED_ROWS)
    return {m.name: [dg.TableColumnDep(rows, name) for name in _packed_from(m)] for m in plan.modalities}


def _of_table(
    spec: DatasetSpec, stage: Stage, schema: DatasetSchema | None
) -> Iterator[tuple[str, list[dg.TableColumnDep]]]:
    """Each column of a table with the columns that it is made of."""
    reserved = stage.tables[0].schema(DatasetSchema()).names
    own = [column.name for column in _json_columns(spec, schema)]
    if stage is RAW_SHARDS:
        return
    above = asset_key(spec, stage.upstream[0])
    if stage is ROWS:
        members = {
            "sample_id": ("sample_key",),
            "position": ("ordinal",),
            "modality": ("extension",),
            "source_ref": ("shard", "member", "byte_offset", "byte_size"),
            "source": ("shard", "byte_offset", "byte_size"),
            "source_member": ("shard", "member"),
        }
        for name, columns in members.items():
            yield name, [dg.TableColumnDep(above, column) for column in columns]
        for column in _json_columns(spec, schema):
            yield column.name, [dg.TableColumnDep(shards_key(spec), column.source)]
        return
    for name in [*reserved, *own]:
        is_fetched = stage is MATERIALIZED_ROWS and name in ("binary_content", "materialize_error")
        yield name, [dg.TableColumnDep(above, "source_ref" if is_fetched else name)]
    if stage is FILTERED_ROWS:
        for column in _annotator_columns(spec):
            yield column.name, [dg.TableColumnDep(above, _CONTENT.get(column.rows, "binary_content"))]
