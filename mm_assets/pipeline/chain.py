"""The chain of stages, from shards to the manifest: their tables, inputs, and the settings that change them.

Only this table names stages and their tables. Digests, files, catalog views, the links that publication verifies,
Dagster's assets and the numbers of the command line follow from it. The code of a stage is in
`pipeline.partition.stages`, its checks in `checks.catalog`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from mm_assets.fields import FIELD_NAMES, import_field
from mm_assets.fields.registry import load_class
from mm_assets.fields.user_code import code_digest, is_own
from mm_assets.filters.base import Annotator, Filter
from mm_assets.packing.plan import declared_fields, judged_part
from mm_assets.pipeline.spec import DatasetSpec, ExportOptions, IndexOptions, plain
from mm_assets.rows.base import source_formats
from mm_assets.rows.references import reference_schema
from mm_assets.rows.schema import (
    DROPPED_SCHEMA,
    HARMLESS_REJECTS,
    KEPT,
    REJECTS_SCHEMA,
    UNDECODABLE_SCHEMA,
    DatasetSchema,
)
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA

__all__ = [
    "CHAIN",
    "DROPPED",
    "FILTERED_ROWS",
    "KEPT_OMITTED",
    "KEPT_REFUSED",
    "KEPT_UNDECODABLE",
    "MANIFEST",
    "MATERIALIZED_ROWS",
    "MISSING_END",
    "PACKED_FOLDER",
    "PACKED_STAGES",
    "PUBLISHED",
    "RAW_SHARDS",
    "RECORDED_STAGES",
    "REJECTS",
    "ROWS",
    "STAGE_OF_FILE",
    "TABLES",
    "UNDECODABLE",
    "Stage",
    "Table",
    "export_stage",
    "index_stage",
    "packed_stages",
    "recorded_stages",
    "summary_numbers",
]

MISSING_END = f"{KEPT}.missing_end"  # as `rows.columns.NO_COLUMN`
KEPT_UNDECODABLE, KEPT_REFUSED, KEPT_OMITTED = (f"{KEPT}.{reason}" for reason in ("undecodable", "refused", "omitted"))
PACKED_FOLDER = "packed"  # of the packed files of both formats, below the dataset's folder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """A Parquet table, one file per partition.

    Attributes:
        name: its folder, its name in a record, and the view over all partitions.
        schema: its columns, by the dataset's schema.
        has_references: whether its media stay in the shards, as `rows.references` says.
    """

    name: str
    schema: Callable[[DatasetSchema], pa.Schema]
    has_references: Callable[[DatasetSpec], bool] = lambda _: False

    def columns(self, spec: DatasetSpec, schema: DatasetSchema) -> pa.Schema:
        """Its columns in a dataset; errors as `reference_schema`."""
        made = self.schema(schema)
        return reference_schema(made) if self.has_references(spec) else made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """One stage; an asset in Dagster, and a record of each partition where it makes tables or a packed file.

    Attributes:
        name: name of the asset and of the record.
        description: shown in the UI.
        kinds: formats that it reads or makes, shown in the UI.
        upstream: the stages whose files it reads.
        tables: its tables, the main one first.
        packed_format: format of the packed file that it makes.
        is_partitioned: whether it is run for each partition; else it is of the whole dataset.
        version: raised by hand when the files that it makes of the same input change: it and the stages after it then
            run again for every partition.
        settings: what changes its files by the names of the settings, in addition to its upstream's.
        code: the user's classes that make its files, by what the declaration calls them; likewise.
        decided: what of the dataset's schema changes its files, by the names of `schema.json`; likewise.
        opens_shards: whether it reads the shards, in whatever form its tables are.
        loss_limit: the setting that limits what its second table may list; part of `settings` where it is given.
        harmless: reasons in its second table that are not losses.
        numbers: heading in the summary of a run to a count of its record.
    """

    name: str
    description: str
    kinds: frozenset[str]
    upstream: tuple[Stage, ...] = ()
    tables: tuple[Table, ...] = ()
    packed_format: str | None = None
    is_partitioned: bool = True
    version: int = 1
    settings: Callable[[DatasetSpec], Mapping[str, Any]] = lambda _: {}
    code: Callable[[DatasetSpec], Mapping[str, type]] = lambda _: {}
    decided: Callable[[DatasetSpec, DatasetSchema], Mapping[str, Any]] = lambda *_: {}
    opens_shards: Callable[[DatasetSpec], bool] = lambda _: False
    loss_limit: str | None = None
    harmless: frozenset[str] = frozenset()
    numbers: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        return _of_name, (self.name,)  # stages are compared by identity, and have functions

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it makes of a partition, as in its record."""
        packed = () if self.packed_format is None else (self.packed_format,)
        return (*(table.name for table in self.tables), *packed)

    @property
    def lineage(self) -> tuple[Stage, ...]:
        """The stages that lead to this one, in the order of the chain, and itself as the last."""
        return (*dict.fromkeys(stage for above in self.upstream for stage in above.lineage), self)

    def fetches_again(self, spec: DatasetSpec) -> bool:
        """Whether it reads media from the shards because the table that it reads has references to them."""
        return any(table.has_references(spec) for above in self.upstream for table in above.tables)

    def reads_shards(self, spec: DatasetSpec) -> bool:
        """Whether it reads the shards, for the first time or again."""
        return self.opens_shards(spec) or self.fetches_again(spec)

    def is_made(self, spec: DatasetSpec) -> bool:
        """Whether the dataset has it: `formats` says what is packed."""
        return self.packed_format is None or self.packed_format in spec.formats

    def made_with(self, spec: DatasetSpec, schema: DatasetSchema | None = None) -> dict[str, str]:
        """What changes its own files, its inputs aside, as digests by name; `changed` says what differs in words.

        Args:
            spec: the declaration.
            schema: the dataset's; None leaves it out.
        """
        given = {**self.settings(spec)}
        if any(table.has_references(spec) for table in self.tables):
            given["retain"] = "references"
        settings = {name: _digest(value)[:_DIGITS] for name, value in given.items()}
        code = {f"{_CODE}{name}": code_digest(cls)[:_DIGITS] for name, cls in self.code(spec).items()}
        decided = {} if schema is None else self.decided(spec, schema)
        of_schema = {f"{_SCHEMA}{name}": _digest(value)[:_DIGITS] for name, value in decided.items()}
        return {"version": str(self.version), **settings, **code, **of_schema}

    def changed(self, before: Mapping[str, str], after: Mapping[str, str]) -> str:
        """What differs between two of its `made_with`, as a sentence; empty where nothing does."""
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        said = [
            f"the version of {self.name}"
            if name == "version"
            else f"the {name}"
            if name.startswith(_CODE)
            else f"`{name.removeprefix(_SCHEMA)}` of the dataset's schema"
            if name.startswith(_SCHEMA)
            else f"`{name}`"
            for name in names
            if name.removeprefix(_SCHEMA) == name or name.removeprefix(_SCHEMA) not in names
        ]
        return f"{', '.join(said)} changed" if said else ""

    def digest(self, spec: DatasetSpec, schema: DatasetSchema | None = None) -> str:
        """SHA-256 over `made_with` of this stage and of those of the dataset that lead to it, hexadecimal."""
        return _digest({stage.name: stage.made_with(spec, schema) for stage in self.lineage if stage.is_made(spec)})

    def recorded_digest(self, made_with: Mapping[Stage, Mapping[str, str]]) -> str:
        """`digest` without a schema, as it was when stages were recorded with these `made_with`."""
        found = {stage: made_with[stage] for stage in self.lineage if stage in made_with}
        return _digest(
            {
                stage.name: {name: digest for name, digest in given.items() if not name.startswith(_SCHEMA)}
                for stage, given in found.items()
            }
        )


def _prefixed_by(shards: str) -> str | bool:
    """What the ids of samples in groups depend on: `shards`, if its shards may be in different folders."""
    return True if _ONE_FOLDER.fullmatch(shards) else shards


_ONE_FOLDER = re.compile(r"[^*?\[{]*/[^/{]*[*?\[][^/{]*")
_CODE, _SCHEMA = "code of ", "schema: "  # before the names in `Stage.made_with` that are not settings
_DIGITS = 16


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _packed_settings(spec: DatasetSpec) -> Mapping[str, Any]:
    return {"pack": spec.declared["pack"], "name": spec.name, "on_misaligned": spec.on_misaligned == "fail"}


def _judged(pack: Any) -> Mapping[str, Any]:
    """What of the declared ``pack`` decides which rows can be packed."""
    given = pack if isinstance(pack, Mapping) else {"preset": pack}
    return {"preset": given.get("preset"), "fields": judged_part(given.get("fields") or ())}


def _judged_plan(spec: DatasetSpec, schema: DatasetSchema) -> Any:
    # Where misaligned samples are dropped, every packed value may decide.
    return schema.pack if spec.on_misaligned == "drop_sample" else judged_part(schema.pack.get("modalities", ()))


def _user_fields(pack: Any) -> Mapping[str, type]:
    """The user's own fields among those that a declaration's ``pack`` names."""
    found = {name: import_field(name) if ":" in name else FIELD_NAMES.get(name) for name in declared_fields(pack)}
    return {name: cls for name, cls in sorted(found.items()) if cls is not None and not is_own(cls)}


def _user_classes(base: type, *configs: Mapping[str, Any]) -> Mapping[str, type]:
    """The user's own filters or annotators among those of a declaration."""
    named = [str(config["type"]) for config in configs if ":" in str(config["type"])]
    return {name: load_class(name, base) for name in sorted(named)}


def _user_source(spec: DatasetSpec) -> Mapping[str, type]:
    formats = {} if spec.source is None else source_formats(spec.source, where=spec.where)
    return {name: cls for name, cls in formats.items() if not is_own(cls)}


REJECTS = Table(name="rejects", schema=lambda _: REJECTS_SCHEMA)
DROPPED = Table(name="dropped", schema=lambda _: DROPPED_SCHEMA)
UNDECODABLE = Table(name="undecodable", schema=lambda _: UNDECODABLE_SCHEMA)

RAW_SHARDS = Stage(
    name="raw_shards",
    description="Member index: a row per archive member with its offset and size. Payloads are not read.",
    kinds=frozenset({"tar", "parquet"}),
    tables=(Table(name="raw_shards", schema=lambda _: MEMBER_INDEX_SCHEMA),),
    settings=lambda spec: {
        "source": spec.source,
        "on_damaged_shard": spec.on_damaged_shard,
        "on_missing_end": spec.on_missing_end,
        "parquet.compression": spec.parquet.compression,
        "parquet.row_group_bytes": spec.parquet.row_group_bytes,
        **({} if spec.samples.roles is None else {"samples.roles": plain(spec.samples.roles)}),
    },
    code=_user_source,
    opens_shards=lambda _: True,
    numbers=(("members", "members"),),
)
ROWS = Stage(
    name="rows",
    description=(
        "Row table: a metadata row per sample, a row per text and media item; what became no row is in `rejects`."
    ),
    kinds=frozenset({"parquet"}),
    upstream=(RAW_SHARDS,),
    version=2,
    tables=(Table(name="rows", schema=DatasetSchema.row_schema), REJECTS),
    settings=lambda spec: {
        # Roles are in the index already, and what is done with PDFs is in the schema.
        **{f"samples.{name}": plain(value) for name, value in spec.samples if name not in ("roles", "pdf", "pdf_dpi")},
        "partition_pattern": spec.partition_pattern is not None and _prefixed_by(spec.shards),
        "max_rejected": spec.max_rejected,
    },
    decided=lambda spec, schema: {
        "user_columns": [column.to_json() for column in schema.user_columns],
        **({} if schema.pdf == "binary" else {"pdf": schema.pdf, "samples.pdf_dpi": spec.samples.pdf_dpi}),
    },
    opens_shards=lambda _: True,
    loss_limit="max_rejected",
    harmless=HARMLESS_REJECTS,
    numbers=(("rows", "rows"),),
)
MATERIALIZED_ROWS = Stage(
    name="materialized_rows",
    description="The same rows with the media bytes in `binary_content`, or the reason in `materialize_error`.",
    kinds=frozenset({"parquet"}),
    upstream=(ROWS,),
    version=2,
    tables=(
        Table(
            name="materialized_rows",
            schema=DatasetSchema.row_schema,
            has_references=lambda spec: spec.retain != "all" and spec.materialize == "read",
        ),
    ),
    settings=lambda spec: {
        "materialize": spec.materialize,
        "on_materialize_error": spec.on_materialize_error == "fail",
        "max_content_bytes": spec.max_content_bytes,
    },
    opens_shards=lambda spec: spec.materialize == "read",
)
FILTERED_ROWS = Stage(
    name="filtered_rows",
    description=(
        "The rows that the filters keep, with the annotators' columns; the others are in `dropped`, with the reason, "
        "and media that do not decode, or contents with another fault, in `undecodable`."
    ),
    kinds=frozenset({"parquet"}),
    upstream=(MATERIALIZED_ROWS,),
    version=2,
    tables=(
        Table(
            name="filtered_rows",
            schema=DatasetSchema.filtered_schema,
            has_references=lambda spec: spec.retain == "none",
        ),
        DROPPED,
        UNDECODABLE,
    ),
    settings=lambda spec: {
        "on_materialize_error": "keep" if spec.on_materialize_error == "fail" else spec.on_materialize_error,
        "annotators": [dict(config) for config in spec.annotators],
        "filters": [dict(config) for config in spec.filters],
        "on_empty_sample": spec.on_empty_sample,
        "renumber": spec.renumber,
        "on_misaligned": spec.on_misaligned == "drop_sample",
        "on_undecodable": spec.on_undecodable,
        "decodable": spec.decodable,
        "max_dropped": spec.max_dropped,
        "pack": spec.declared["pack"] if spec.on_misaligned == "drop_sample" else _judged(spec.declared["pack"]),
    },
    code=lambda spec: {
        **_user_classes(Annotator, *spec.annotators),
        **_user_classes(Filter, *spec.filters),
        **_user_fields(spec.pack),
    },
    decided=lambda spec, schema: {
        "annotator_columns": [column.to_json() for column in schema.annotator_columns],
        "pack": _judged_plan(spec, schema),
    },
    opens_shards=lambda spec: spec.materialize == "write",
    loss_limit="max_dropped",
    numbers=(("kept", "kept"),),
)
_PACKED = tuple(
    Stage(
        name=f"packed_{form}",
        description=description,
        kinds=frozenset({form}),
        upstream=(FILTERED_ROWS,),
        packed_format=form,
        settings=_packed_settings,
        code=lambda spec: _user_fields(spec.pack),
        decided=lambda _, schema: {"pack": schema.pack},
        numbers=numbers,
    )
    for form, description, numbers in (
        (
            "mult",
            "MULT: one record per sample, all its modalities together.",
            (("samples", "samples"), ("MULT bytes", "bytes")),
        ),
        (
            "mstr",
            "MSTR: one stream per modality, each read without touching the others.",
            (("samples", "samples"), ("MSTR bytes", "bytes")),
        ),
    )
)
PUBLISHED = Stage(
    name="published",
    description="Record of a partition whose files belong together and passed every check; the last step of a run.",
    kinds=frozenset({"json"}),
    upstream=_PACKED,
)
MANIFEST = Stage(
    name="manifest",
    description="Dataset version: the published partitions with their packed files, counts, digests and schema.",
    kinds=frozenset({"json"}),
    upstream=(PUBLISHED,),
    is_partitioned=False,
)

CHAIN: tuple[Stage, ...] = (RAW_SHARDS, ROWS, MATERIALIZED_ROWS, FILTERED_ROWS, *_PACKED, PUBLISHED, MANIFEST)
"""Every stage, each after those whose files it reads."""

TABLES: tuple[str, ...] = tuple(table.name for stage in CHAIN for table in stage.tables)
"""Names of all tables."""

RECORDED_STAGES: tuple[Stage, ...] = tuple(stage for stage in CHAIN if stage.files)
"""The stages that make files of a partition, and a record of them."""

PACKED_STAGES: Mapping[str, Stage] = {stage.packed_format: stage for stage in CHAIN if stage.packed_format is not None}
"""Packed format to the stage that makes it."""

STAGE_OF_FILE: Mapping[str, Stage] = {name: stage for stage in RECORDED_STAGES for name in stage.files}
"""The stage that makes a file of a partition: a table or a packed format, as in a record."""


def export_stage(options: ExportOptions) -> Stage:
    """The stage of an export, which follows `PUBLISHED` and is not in `CHAIN`: a partition is published without it."""
    from mm_assets.exports.export import EXPORTS  # which opens datasets: few declarations have exports

    declared = options.model_dump(exclude={"name", "out_options"}, exclude_defaults=True)
    return Stage(
        name=options.asset,
        description=f"The packed samples as {options.format}, read again and compared (docs/exports.md).",
        kinds=frozenset({options.format}),
        upstream=(PUBLISHED,),
        version=EXPORTS[options.format].VERSION,
        settings=lambda _: {name: plain(value) for name, value in declared.items()},
    )


def index_stage(options: IndexOptions) -> Stage:
    """The stage of an index, which follows `MANIFEST` and is not in `CHAIN`: a dataset version is complete without."""
    return Stage(
        name=options.asset,
        description=f"Index of the vectors {options.modality!r} for searches by {options.metric} (docs/embeddings.md).",
        kinds=frozenset({"index"}),
        upstream=(MANIFEST,),
        is_partitioned=False,
        settings=lambda _: {"modality": options.modality, "metric": options.metric},
    )


def _of_name(name: str) -> Stage:
    return next(stage for stage in CHAIN if stage.name == name)


def recorded_stages(spec: DatasetSpec) -> tuple[Stage, ...]:
    """Those of `RECORDED_STAGES` that the dataset has."""
    return tuple(stage for stage in RECORDED_STAGES if stage.is_made(spec))


def packed_stages(spec: DatasetSpec) -> Mapping[str, Stage]:
    """Those of `PACKED_STAGES` that the dataset has."""
    return {form: stage for form, stage in PACKED_STAGES.items() if stage.is_made(spec)}


def summary_numbers(spec: DatasetSpec) -> Mapping[str, tuple[Stage, str]]:
    """What the summary of a run shows of a partition: heading to a stage and a count of its record.

    Of several packed formats these are the numbers of the first.
    """
    _, *others = packed_stages(spec).values()
    stages = (stage for stage in recorded_stages(spec) if stage not in others)
    return {heading: (stage, count) for stage in stages for heading, count in stage.numbers}
