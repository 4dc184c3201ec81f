"""What a dataset's declaration says: one model with the type, default, bounds and description of every key.

`DatasetSpec.from_config` takes the mapping of a YAML file or of the command line. It returns an immutable value or
raises a `ConfigError` that names the file, the key, what was found and what is allowed. Nothing here touches storage:
`pipeline.state.registration` makes the decisions that need a sample of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from mm_assets.errors import ConfigError, meant
from mm_assets.filters.base import Annotator, Filter
from mm_assets.filters.registry import (
    BUILTIN_ANNOTATORS,
    BUILTIN_FILTERS,
    build_annotator,
    build_filter,
    parameter_schemas,
)
from mm_assets.packing.judge import Mode, Policy
from mm_assets.packing.presets import ALL_COLUMNS, PRESETS, check_pack_config
from mm_assets.pipeline.spec_errors import config_error, shown
from mm_assets.rows.base import source_formats
from mm_assets.rows.schema import MemberRules, Settings, Text, Texts
from mm_assets.storage.urls import is_local, normalized_url, split_signature, url_fault

__all__ = ["NOT_DECISIVE", "DatasetSpec", "EngineOptions", "ExportOptions", "IndexOptions", "ParquetOptions", "plain"]

NOT_DECISIVE = frozenset({"allow_references", "allowed_references", "pdf_dpi"})
"""Settings of `samples` that do not decide the schema: with and without them a sample has the same kinds of row."""

_NAME = "[A-Za-z][A-Za-z0-9_]*"  # the names that Dagster allows in asset keys and job names
_FORMATS = sorted(source_formats(None, where=""))
_PERCENTAGE = r"[0-9]{1,3}(\.[0-9]{1,6})?%"
_OWNER = r"team:[A-Za-z0-9_-]+|[^@\s]+@[^@\s]+\.[^@\s]+"


# -- names and times that Dagster allows for tags, concurrency pools and schedules

_POOL = r"[A-Za-z0-9_/-]+"
_TAG = r"[A-Za-z0-9_.-]{1,63}(/[A-Za-z0-9_.-]{1,63})?"
_TAG_VALUE = r"[A-Za-z0-9_.-]{0,63}"


_CRON_VALUES = {
    "minute": "[0-5]?[0-9]",
    "hour": "[01]?[0-9]|2[0-3]",
    "day of the month": "0?[1-9]|[12][0-9]|3[01]|[lL]",
    "month": "0?[1-9]|1[0-2]|[A-Za-z]{3}",
    "day of the week": "[0-7]|[A-Za-z]{3}",
}


def _cron_field(value: str) -> str:
    item = rf"(\*|({value})(-({value}))?)(/[0-9]{{1,2}})?"
    return rf"{item}(,{item})*"


_EVERY = "@(hourly|daily|midnight|weekly|monthly|yearly)"
_FIELDS = r"\s+".join(map(_cron_field, _CRON_VALUES.values()))
_CRON = rf"^\s*({_EVERY}|{_FIELDS})\s*$"


def _check_cron(cron: str) -> str:
    """The times of a schedule; `ValueError` for what is not cron, such as a minute of 99."""
    if not re.fullmatch(_CRON, cron):
        expected = f"five fields of cron ({', '.join(_CRON_VALUES)}) such as '0 3 * * *', in UTC"
        raise ValueError(f"is {cron!r}, expected {expected}")
    return cron


def _check_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """The tags of assets; `ValueError` for what Dagster refuses."""
    for name, value in tags.items():
        if not re.fullmatch(_TAG, name) or name.startswith("dagster/"):
            raise ValueError(f"has {name!r}, expected letters, digits, `_`, `-` and `.`, and no prefix `dagster/`")
        if not re.fullmatch(_TAG_VALUE, value):
            raise ValueError(f"has {value!r} for {name!r}, expected letters, digits, `_`, `-` and `.`, at most 63")
    return tags


def _check_pool(pool: str) -> str:
    """The name of a concurrency pool; `ValueError` for what Dagster refuses."""
    if not re.fullmatch(_POOL, pool):
        raise ValueError(f"is {pool!r}, expected letters, digits, `_`, `-` and `/`")
    return pool


# -- types of values


def _check_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError(f"is {name!r}, expected letters, digits and _, starting with a letter")
    return name


def _check_owners(owners: tuple[str, ...]) -> tuple[str, ...]:
    for owner in owners:
        if not re.fullmatch(_OWNER, owner):
            raise ValueError(f"has {owner!r}, expected e-mail addresses or team:name")
    return owners


def _check_partition_pattern(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    if "partition" not in compiled.groupindex and compiled.groups != 1:
        raise ValueError(f"has {compiled.groups} groups, expected one, or one named `partition`")
    return pattern


def _check_source(source: str) -> str:
    source_formats(source, where="")
    return source


def _check_root(root: object) -> object:
    if root is None:
        raise ValueError("is empty: is the environment variable that it names set?")
    return _check_url(root) if isinstance(root, str) else root


def _check_url(url: str) -> str:
    if (why := url_fault(url)) is not None:
        raise ValueError(f"is {url!r}, which {why}")
    return url


def _absolute_url(url: str, info: ValidationInfo) -> str:
    return normalized_url(_check_url(url), _base(info))


def _check_formats(formats: tuple[str, ...]) -> tuple[str, ...]:
    if not formats or len(set(formats)) < len(formats):
        raise ValueError(f"is {list(formats)}, expected mult, mstr or both")
    return tuple(sorted(formats, reverse=True))  # one order: what is made does not depend on it


def _check_export(name: str) -> str:
    from mm_assets.exports.export import EXPORTS  # which opens datasets: few declarations have exports

    if name not in EXPORTS:
        raise ValueError(f"is {name!r}, allowed: {', '.join(EXPORTS)}{meant(name, EXPORTS)}")
    return name


def _name_exports(schema: dict[str, Any]) -> None:
    """Adds the formats to the schema, when one is asked for."""
    from mm_assets.exports.export import EXPORTS

    schema["enum"] = [*EXPORTS]


def _check_exports(exports: tuple[ExportOptions, ...]) -> tuple[ExportOptions, ...]:
    for what in ("asset", "out"):
        values = [getattr(one, what) for one in exports]
        repeated = [value for n, value in enumerate(values) if value is not None and value in values[:n]]
        if repeated:
            name, setting = (repeated[0].removeprefix("export_"), "name") if what == "asset" else (repeated[0], what)
            raise ValueError(f"has two exports called {name!r}: give each a `{setting}` of its own")
    return exports


def _check_indexes(indexes: tuple[IndexOptions, ...]) -> tuple[IndexOptions, ...]:
    assets = [one.asset for one in indexes]
    if repeated := [asset for number, asset in enumerate(assets) if asset in assets[:number]]:
        raise ValueError(f"has two indexes with the asset {repeated[0]!r}: leave one of them out")
    return indexes


def _check_limit(limit: object) -> object:
    if isinstance(limit, str):
        allowed = re.fullmatch(_PERCENTAGE, limit) is not None and float(limit.removesuffix("%")) <= 100
    else:
        allowed = limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0)
    if not allowed:
        said = "a whole number of at least 0, or a percentage of at most 100 such as 0.5%"
        raise ValueError(f"is {shown(limit)}, expected {said}")
    return limit


def _builds(build: Callable[..., object]) -> BeforeValidator:
    """Builds each filter or annotator of a list once, which checks its type and parameters."""

    def check(configs: Any, info: ValidationInfo) -> Any:
        for number, config in enumerate(configs if isinstance(configs, (list, tuple)) else ()):
            build(config, where="", key=f"{info.field_name}[{number}]")
        return configs

    return BeforeValidator(check)


def _check_pack(pack: Any, info: ValidationInfo) -> Any:
    pack = _tokenizers_below(pack, _base(info))
    check_pack_config(pack, where="")
    return dict(pack) if isinstance(pack, Mapping) else pack


def _base(info: ValidationInfo) -> Path | None:
    return (info.context or {}).get("base")


def _below(url: str, base: Path) -> str:
    if not is_local(url):
        return url
    path = Path(url.split("://", 1)[-1] if "://" in url else url).expanduser()
    return str(path if path.is_absolute() else base / path)


def _tokenizers_below(value: Any, base: Path | None) -> Any:
    """The declaration with the files of tokenizers relative to its folder, as its shards are."""
    if base is None:
        return value
    if isinstance(value, list):
        return [_tokenizers_below(item, base) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _tokenizers_below(item, base) for key, item in value.items()}
    tokenizer = found.get("tokenizer")
    if isinstance(tokenizer, Mapping) and isinstance(tokenizer.get("file"), str):
        found["tokenizer"] = {**tokenizer, "file": _below(tokenizer["file"], base)}
    return found


def _named_or_imported(names: Iterable[str]) -> dict[str, Any]:
    return {"pattern": f"^({'|'.join(sorted(names))})$|:"}


@dataclass(frozen=True)
class _Typed:
    """A list of mappings whose ``type`` is in a table or an import path, whose class checks the other keys."""

    table: Mapping[str, str]
    base: type

    def __get_pydantic_json_schema__(self, _schema: object, _handler: object) -> dict[str, Any]:
        """The schema, with the parameters of the types in the table; a parameter may also be a template."""
        kind = {
            "type": "string",
            "description": f"{', '.join(sorted(self.table))}; or module:Class.",
            **_named_or_imported(self.table),
        }
        template = {"type": "string", "pattern": r"\{\{"}
        of_types = []
        for name, parameters in parameter_schemas(self.table, self.base).items():
            checked = {key: {"if": template, "else": schema} for key, schema in parameters.items()}
            then = {"properties": checked, "propertyNames": {"enum": ["type", *parameters]}}
            is_type = {"properties": {"type": {"const": name}}, "required": ["type"]}
            of_types.append({"if": is_type, "then": then})
        item = {"type": "object", "additionalProperties": True, "properties": {"type": kind}, "required": ["type"]}
        return {"type": "array", "items": {**item, "allOf": of_types}}


_PACK_FIELDS = {
    "preset": {"type": "string", "enum": list(PRESETS), "description": "The preset that the fields are added to."},
    "fields": {"type": "array", "items": {"type": "object"}, "description": "Packed modalities (docs/packing.md)."},
    "columns": {
        "anyOf": [
            {"type": "string", "enum": [ALL_COLUMNS]},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        ],
        "description": "Columns that are packed: names, patterns, or all.",
    },
}
_PACK_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": list(PRESETS)},
        {"type": "object", "properties": _PACK_FIELDS, "additionalProperties": False},
    ]
}


_LIMIT_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{_PERCENTAGE}$"}]}

_Limit = Annotated[int | str | None, BeforeValidator(_check_limit), WithJsonSchema(_LIMIT_SCHEMA)]
_Configs = tuple[Mapping[str, Any], ...]


# -- the model


class ParquetOptions(Settings):
    """How tables are written."""

    compression: Literal["zstd", "snappy", "lz4", "gzip", "none"] = Field(
        default="zstd", description="Codec of text and identity columns; media is stored as it is.", examples=["snappy"]
    )
    row_group_bytes: int = Field(
        default=32 << 20,
        ge=1 << 16,
        description="Content of one row group, media included, in bytes.",
        examples=[64 << 20],
    )


class EngineOptions(Settings):
    """Where a load runs partitions; nothing of it changes a file."""

    type: Literal["processes", "ray"] = Field(
        default="processes",
        description="`processes` of the host that runs the load; `ray`: tasks on the hosts of a Ray cluster "
        "(docs/many-machines.md).",
        examples=["ray"],
    )
    address: Text | None = Field(
        default=None,
        description="Of a Ray cluster, `HOST:PORT`. Default: $RAY_ADDRESS, else a cluster on this host.",
        examples=["head.example.org:6379"],
    )
    jobs: int | None = Field(
        default=None,
        ge=1,
        description="Partitions at work at a time. Default: a process per processor, or as many Ray tasks as the "
        "cluster has processors and memory for. A cluster that starts nodes on demand needs a number.",
        examples=[500],
    )
    memory_bytes: int = Field(
        default=1 << 30,  # a partition needs about half of it beside its largest media
        ge=1 << 20,
        description="Memory that a Ray task asks for; twice as much after a task that had too little.",
        examples=[4 << 30],
    )
    timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="A partition that takes longer is killed and repeated, three times at most. Default: half an hour, "
        "or 20 times the median of the load if that is longer; it doubles each time that a partition exceeds it.",
        examples=[3600],
    )


class ExportOptions(Settings):
    """An export of each published partition, as `mm_assets.export` writes it."""

    format: Annotated[str, AfterValidator(_check_export), Field(json_schema_extra=_name_exports)] = Field(
        description="Format of the files (docs/exports.md).", examples=["webdataset"]
    )
    name: Annotated[Text, AfterValidator(_check_name), Field(json_schema_extra={"pattern": f"^{_NAME}$"})] | None = (
        Field(default=None, description="The asset is `export_<name>`. Default: `format`.", examples=["small"])
    )
    out: Annotated[Text, AfterValidator(_absolute_url)] | None = Field(
        default=None,
        description="Folder or URL that has a folder for each partition; of this export alone. A relative path starts "
        "at the folder of the YAML file. Default: `exports/<name>` in the dataset's folder.",
        examples=["s3://bucket/tars"],
    )
    out_options: Mapping[str, Any] = Field(
        default={}, description="Arguments of the file system of `out`.", examples=[{"profile": "writer"}]
    )
    shard_bytes: int | None = Field(
        default=None,
        ge=1,
        description="A shard ends before the sample that would make its content larger, in bytes. Default: 256 MiB.",
        examples=[1 << 30],
    )
    shard_samples: int | None = Field(
        default=None, ge=1, description="Samples of a shard, whatever their size.", examples=[1000]
    )
    modalities: Texts | None = Field(
        default=None, description="Packed modalities that are exported. Default: all.", examples=[["image", "text"]]
    )
    image_format: Literal["jpeg", "png"] | None = Field(
        default=None, description="Encode images again. Default: copy them.", examples=["jpeg"]
    )
    quality: int = Field(default=95, ge=1, le=100, description="Of JPEG that is encoded again.", examples=[90])

    @property
    def asset(self) -> str:
        """Name of its asset."""
        return f"export_{self.name or self.format}"


class IndexOptions(Settings):
    """An index of a modality of vectors for each dataset version, as `mm-assets index` builds it."""

    modality: Text = Field(
        description="The vectors: a packed modality or an added stream, `NDArrayField` of one dimension.",
        examples=["embedding"],
    )
    metric: Literal["cosine", "ip", "l2"] = Field(
        default="cosine",
        description="How the vectors are searched: cosine, inner product or Euclidean distance.",
        examples=["l2"],
    )
    min_recall: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="The check `recall` fails below this share of the ten nearest.",
        examples=[0.8],
    )

    @property
    def asset(self) -> str:
        """Name of its asset: letters, digits and _ of the modality, and the metric unless it is the default."""
        suffix = "" if self.metric == "cosine" else f"_{self.metric}"
        return f"index_{re.sub(r'[^A-Za-z0-9_]', '_', self.modality)}{suffix}"


class DatasetSpec(Settings):
    """One dataset, as declared."""

    name: Annotated[str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": f"^{_NAME}$"})] = Field(
        description="Name of the dataset: the first part of its asset keys, and its folder below `root`.",
        examples=["web"],
    )
    shards: Annotated[Text, AfterValidator(_absolute_url)] = Field(
        description="A shard or a folder of shards, in any format (docs/sources.md); any fsspec URL. If nothing has "
        "that name, it is a pattern with `{a,b}`, `{000..099}`, `*`, `?` and `[…]`. A relative path starts at the "
        "folder of the YAML file.",
        examples=["s3://bucket/web/*.tar"],
    )
    storage_options: Mapping[str, Any] = Field(
        default={},
        description="Arguments of the file system of `shards`. For `http://` and `https://` also `signature`, the "
        "query of presigned URLs; `shards` may have it too.",
        examples=[{"anon": True}],
    )
    source: (
        Annotated[
            str,
            AfterValidator(_check_source),
            Field(json_schema_extra=_named_or_imported(_FORMATS)),
        ]
        | None
    ) = Field(
        default=None,
        description=f"Format of the shards: {', '.join(_FORMATS)}, or your own as `package.module:Class`. Default: "
        "detected from the first bytes of each shard, else from its name.",
        examples=["tar"],
    )
    root: Annotated[Text, BeforeValidator(_check_root)] = Field(
        description="Folder or URL in which the dataset's folder is created. Default in a defs.yaml and on the "
        "command line: `$MM_ASSETS_ROOT`, else `$DAGSTER_HOME/data`, else `data` here.",
        examples=["s3://bucket/packed"],
    )
    root_options: Mapping[str, Any] = Field(
        default={}, description="Arguments of the file system of `root`.", examples=[{"profile": "writer"}]
    )
    partition_pattern: Annotated[Text, AfterValidator(_check_partition_pattern)] | None = Field(
        default=None,
        description="Regular expression that groups shards, matched in a shard's path below the fixed part of the "
        "glob: its group `partition`, or its only group, is the partition key. Default: one partition per shard, "
        "named by its file name without suffix.",
        examples=["^(?P<partition>[a-z]+)/"],
    )
    settle_seconds: float = Field(
        default=30.0,  # an upload of one object rarely pauses longer
        ge=0,
        allow_inf_nan=False,
        description="A shard is registered once it has not changed for this many seconds.",
        examples=[120],
    )
    description: str = Field(
        default="", description="Shown in the UI with each asset and job.", examples=["Pages of the open web."]
    )
    owners: Annotated[Texts, AfterValidator(_check_owners)] = Field(
        default=(), description="E-mail addresses or `team:name`, shown in the UI.", examples=[["team:data"]]
    )
    tags: Annotated[Mapping[str, str], AfterValidator(_check_tags)] = Field(
        default={}, description="Tags of the assets in the UI, which filters by them.", examples=[{"domain": "web"}]
    )
    samples: MemberRules = Field(
        default_factory=MemberRules, description="How members become rows.", examples=[{"sample_id_field": "url"}]
    )
    materialize: Literal["read", "write"] = Field(
        default="read",
        description="`read`: fetch content before filtering; `write`: fetch only what filters without content keep.",
        examples=["write"],
    )
    on_materialize_error: Literal["keep", "drop_row", "drop_sample", "fail"] = Field(
        default="keep",
        description="For media that could not be read. `keep`: the row stays in `materialized_rows`, with the "
        "reason, and is dropped before packing; `drop_row` and `drop_sample`: drop it, or its whole sample, in "
        "`filtered_rows`; `fail`: fail the partition.",
        examples=["drop_sample"],
    )
    on_damaged_shard: Literal["fail", "salvage"] = Field(
        default="fail",
        description="For shards whose structure is damaged. `fail`: fail the partition; `salvage`: take what is "
        "before and after the damage.",
        examples=["salvage"],
    )
    on_missing_end: Literal["note", "fail"] = Field(
        default="note",
        description="For tars without the two blocks of zeros at their end, which may be truncated between members. "
        "`note`: list them in the losses; `fail`: fail the partition.",
        examples=["fail"],
    )
    max_content_bytes: int = Field(
        default=256 << 20,  # an item is held in memory, a few times over while it is packed
        ge=1,
        description="A larger item is an error on its row; in bytes.",
        examples=[1 << 30],
    )
    annotators: Annotated[
        _Configs, Field(strict=False), _builds(build_annotator), _Typed(BUILTIN_ANNOTATORS, Annotator)
    ] = Field(
        default=(),
        description="Annotators in order, each with its `type` and parameters (docs/filters.md); your own by import "
        "path.",
        examples=[[{"type": "image_size"}]],
    )
    filters: Annotated[_Configs, Field(strict=False), _builds(build_filter), _Typed(BUILTIN_FILTERS, Filter)] = Field(
        default=(),
        description="Filters in order, each with its `type` and parameters (docs/filters.md); your own by import path.",
        examples=[[{"type": "text_length", "min_chars": 20}]],
    )
    on_empty_sample: Literal["drop", "keep"] = Field(
        default="drop", description="What happens to samples that the filters left without content.", examples=["keep"]
    )
    renumber: bool = Field(default=False, description="Number positions from 0 again after filtering.", examples=[True])
    parquet: ParquetOptions = Field(
        default_factory=ParquetOptions,
        description="Compression and row groups of the tables.",
        examples=[{"compression": "snappy"}],
    )
    pack: Annotated[str | Mapping[str, Any] | None, BeforeValidator(_check_pack), WithJsonSchema(_PACK_SCHEMA)] = Field(
        default=None,
        description="A preset, or fields with selectors, the preset that they are added to, and columns to pack "
        "(docs/packing.md). Default: the preset that loses nothing of a sample of the shards.",
        examples=["interleaved"],
    )
    formats: Annotated[tuple[Literal["mult", "mstr"], ...], Field(strict=False), AfterValidator(_check_formats)] = (
        Field(
            default=("mult", "mstr"),
            description="What each partition is packed as: `mult`, whole samples in any order; `mstr`, one modality at "
            "a time. With a longer list only what is missing is made.",
            examples=[["mstr"]],
        )
    )
    exports: Annotated[tuple[ExportOptions, ...], Field(strict=False), AfterValidator(_check_exports)] = Field(
        default=(),
        description="Formats of other projects that each published partition is exported to (docs/exports.md).",
        examples=[[{"format": "webdataset", "out": "s3://bucket/tars"}]],
    )
    indexes: Annotated[tuple[IndexOptions, ...], Field(strict=False), AfterValidator(_check_indexes)] = Field(
        default=(),
        description="Modalities of vectors that each dataset version has an index of (docs/embeddings.md).",
        examples=[[{"modality": "embedding"}]],
    )
    retain: Literal["all", "filtered", "none"] = Field(
        default="all",
        description="The tables that hold media. `all`: `materialized_rows` and `filtered_rows`; `filtered`: only "
        "`filtered_rows`; `none`: neither. The others have the size and CRC-32C of each item, and stages that need it "
        "read it from the shard again (docs/spec/files.md).",
        examples=["none"],
    )
    on_misaligned: Literal["warn", "drop_sample", "fail"] = Field(
        default="warn",
        description="For samples whose parts contradict each other in time or place, such as notes after the end of "
        "their audio. `warn`: pack them and report it; `fail`: fail the partition.",
        examples=["drop_sample"],
    )
    on_undecodable: Policy = Field(
        default="drop_row",
        description="For media that do not decode, or that their field refuses; the table `undecodable` lists them. "
        "`drop_row` and `drop_sample`: drop the row, or its whole sample, in `filtered_rows`; `keep`: pack the bytes "
        "where a field takes them; `fail`: fail the partition.",
        examples=["drop_sample"],
    )
    decodable: Mode = Field(
        default="full",
        description="`full`: every media item is decoded once before it is packed; `headers`: only what a field "
        "refuses by its header is found.",
        examples=["headers"],
    )
    max_rejected: _Limit = Field(
        default=None,
        description="A partition fails if more entries are in `rejects`: a number, or a percentage of them and the "
        "rows in `rows` together. Harmless ones (docs/running.md) do not count.",
        examples=["1%"],
    )
    max_dropped: _Limit = Field(
        default=None,
        description="A partition fails if more rows are in `dropped`: a number, or a percentage of the rows before "
        "filtering.",
        examples=["5%"],
    )
    batch_bytes: int = Field(
        default=8 << 20, ge=1 << 16, description="Content of one batch in memory, in bytes.", examples=[32 << 20]
    )
    checks: Literal["auto", "grouped", "per_rule", "rollup"] = Field(
        default="auto",
        description="What Dagster shows of the checks. `grouped`: of each partition a few results per asset, each with "
        "a table of its rules; `per_rule`: a result per rule; `rollup`: one result per asset for all partitions, with "
        "those that failed; `auto`: `grouped`, and `rollup` once the dataset has had more than 2,000 partitions "
        "(docs/pipeline.md).",
        examples=["rollup"],
    )
    runs_per_tick: int = Field(
        default=25,
        ge=1,
        description="Largest number of runs that one tick of the sensor or schedule requests.",
        examples=[100],
    )
    bulk_threshold: int = Field(
        default=100,
        ge=0,
        description=(
            "With more pending partitions than this, sensor and schedule request one run for all of them, the job "
            "`<dataset>_load`, in place of a run for each."
        ),
        examples=[1000],
    )
    engine: EngineOptions = Field(
        default_factory=EngineOptions,
        description="Where a load runs partitions, and how many at a time.",
        examples=[{"type": "ray", "address": "head.example.org:6379"}],
    )
    cron: Annotated[Text, AfterValidator(_check_cron), Field(json_schema_extra={"pattern": _CRON})] = Field(
        default="*/15 * * * *", description="When the schedule ticks, in UTC.", examples=["0 * * * *"]
    )
    poll_seconds: int = Field(
        default=30, ge=1, description="Shortest pause between two ticks of a sensor.", examples=[300]
    )
    run_sensor: bool = Field(default=False, description="Start the sensor of shards with the daemon.", examples=[True])
    run_schedule: bool = Field(default=False, description="Start the schedules with the daemon.", examples=[True])
    automation: Literal["none", "eager", "on_cron"] = Field(
        default="none",
        description="Automation condition of the assets of a partition, for Dagster's automation sensor, which the UI "
        "starts. `eager`: a stage runs when its partition is new, its shards changed or the stage before it ran; "
        "`on_cron`: at the ticks of `cron`, once those before it ran. New and changed shards are seen once they are "
        "registered: by *Observe* on the asset `shards`, by `mm-assets register`, or by `run_sensor` or "
        "`run_schedule`, which request their runs themselves and need no condition.",
        examples=["eager"],
    )
    freshness_hours: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="The manifest is shown as overdue when it was last made more hours ago.",
        examples=[24],
    )
    pool: Annotated[Text, AfterValidator(_check_pool), Field(json_schema_extra={"pattern": f"^{_POOL}$"})] | None = (
        Field(
            default=None,
            description="Dagster's concurrency pool of all steps of the dataset, whose limit is set in the UI under "
            "Deployment, Concurrency. A load is one step, of `mm-assets run` too: `--jobs`, or `engine`, limits its "
            "partitions.",
            examples=["disks"],
        )
    )
    keep_manifests: int = Field(
        default=3, ge=1, description="Manifests that `mm-assets clean` keeps, the newest included.", examples=[10]
    )

    _where: str = PrivateAttr("arguments")

    @property
    def where(self) -> str:
        """The file of the declaration, for messages."""
        return self._where

    @model_validator(mode="before")
    @classmethod
    def _split_signature(cls, given: Any) -> Any:
        """Moves the signature of a presigned URL to the options: what is stored and compared is the URL without it."""
        if not isinstance(given, Mapping) or not isinstance(given.get("shards"), str):
            return given
        shards, signature = split_signature(given["shards"])
        options = given.get("storage_options")
        if not signature or not isinstance(options or {}, Mapping):
            return given
        return {**given, "shards": shards, "storage_options": {**(options or {}), "signature": signature}}

    def is_made_from(self, source: str | None) -> bool:
        """Whether the stored `shards` of a dataset name the same place, whatever their spelling."""
        return source is not None and normalized_url(source).rstrip("/") == self.shards.rstrip("/")

    def model_post_init(self, context: Any) -> None:
        """Takes the file of the declaration from the validation's context."""
        self._where = (context or {}).get("where", "arguments")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, where: str, base: Path | None = None, default_root: str | None = None
    ) -> DatasetSpec:
        """Checks a declaration.

        Args:
            config: keys and values as YAML gives them.
            where: the file of the declaration, for messages.
            base: folder that relative local paths of shards and tokenizers start at; None leaves them as they are.
            default_root: storage root where the declaration names none.

        Raises:
            ConfigError: a key is unknown or missing, or a value is not allowed; it names all that are wrong.
        """
        if default_root is not None and isinstance(config, Mapping):
            config = {"root": default_root, **config}
        try:
            return cls.model_validate(config, context={"where": where, "base": base})
        except ValidationError as error:
            errors = (config_error(found, where, cls.model_json_schema()) for found in error.errors())
            first, *others = {found.key: found for found in errors}.values()
            more = "".join(f"; {other.key}: {other.detail}" for other in others)
            raise ConfigError(where, first.key, first.detail + more) from error

    def replace(self, **changes: Any) -> DatasetSpec:
        """A copy with other settings, checked as those of a declaration; errors as `from_config`."""
        return self.from_config({**dict(self), **changes}, where=self.where)

    def build_annotators(self) -> list[Annotator]:
        """The annotators, new ones at each call: they may hold state."""
        return [build_annotator(c, where=self.where, key=f"annotators[{n}]") for n, c in enumerate(self.annotators)]

    def build_filters(self) -> list[Filter]:
        """The filters, new ones at each call: they may hold state."""
        return [build_filter(c, where=self.where, key=f"filters[{n}]") for n, c in enumerate(self.filters)]

    @property
    def declared(self) -> dict[str, Any]:
        """The settings that decide the dataset's schema: change them and the schema must be decided again.

        Of `samples` they are all but those of `NOT_DECISIVE`, so that a new setting is one of them unless listed there.
        """
        return {
            "samples": {name: plain(value) for name, value in self.samples if name not in NOT_DECISIVE},
            "annotators": [dict(a) for a in self.annotators],
            "pack": plain(self.pack),
            **({} if self.source is None else {"source": self.source}),
        }


def plain(value: Any) -> Any:
    """A setting as JSON holds it."""
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    return list(value) if isinstance(value, tuple) else value
