"""What a dataset's declaration says, checked key by key.

`DatasetSpec.from_config` takes the mapping that a YAML file or the command line gives and answers with a frozen value
or a `ConfigError` that names the file, the key, what was found and what is allowed. Nothing here touches storage; what
the first shard decides is in `pipeline.register`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from mm_assets.errors import ConfigError
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.schema import RESERVED_COLUMNS, MemberRules
from mm_assets.storage.urls import is_local

__all__ = ["DATASET_NAME", "PARTITION_KEY", "DatasetSpec", "ParquetOptions"]

DATASET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # what Dagster takes for asset keys and job names
PARTITION_KEY = re.compile(r"[A-Za-z0-9._-]+")
MATERIALIZE_MODES = ("read", "write")
ON_ERROR = ("keep", "drop_row", "drop_sample", "fail")
ON_DAMAGE = ("fail", "salvage")
ON_EMPTY = ("drop", "keep")
ON_MISALIGNED = ("warn", "drop_sample", "fail")
COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")
OWNER = re.compile(r"team:[A-Za-z0-9_-]+|[^@\s]+@[^@\s]+\.[^@\s]+")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetOptions:
    """How tables are written.

    Attributes:
        compression: codec of text and identity columns; media is stored as it is.
        row_group_bytes: content of one row group, media included, in bytes.
    """

    compression: str = "zstd"
    row_group_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One dataset, as declared.

    Attributes:
        name: the dataset's name: first part of its asset keys and folder below the root.
        shards: folder, glob or file of tar shards, or of a Parquet or JSONL list; any fsspec URL.
        storage_options: file-system arguments for `shards`.
        source: format of the shards: a name of `SOURCES` or `TABLE_SOURCES`, or ``package.module:Class``; None detects
            it from the first bytes of each, else from its name.
        root: folder or URL that holds the dataset's folder.
        root_options: file-system arguments for `root`.
        partition_pattern: regular expression over a shard's path below the glob's root; its group ``partition``, or its
            only group, is the partition key. None takes the base name without its suffix.
        settle_seconds: a shard younger than this, or seen for less, is not taken yet.
        description: shown in the UI.
        owners: e-mail addresses or ``team:name``.
        layout: how members become rows.
        materialize: "read" fills `materialized_rows`; "write" fetches only what the filters let through.
        on_materialize_error: "keep", "drop_row", "drop_sample" or "fail".
        on_damaged_shard: "fail" or "salvage".
        max_content_bytes: a larger item is an error on its row.
        annotators: configurations of annotators, in order.
        filters: configurations of filters, in order.
        on_empty_sample: what happens to a sample that the filters left without content: "drop" or "keep".
        renumber: positions count from 0 again after filtering.
        parquet: how tables are written.
        pack: preset name, mapping with fields, or None to look at the first shard.
        on_misaligned: what happens to a sample whose parts contradict each other in time or place, such as notes
            behind the end of their audio: "warn" packs it and says so, "drop_sample" drops it, "fail" fails the
            partition.
        batch_bytes: content of one batch in memory.
        runs_per_tick: cap of runs that one tick of the sensor or schedule requests.
        cron: when the schedule looks for pending partitions.
        poll_seconds: pause between two looks of a sensor.
        run_sensor: the sensor of shards starts with the daemon.
        run_schedule: the schedule starts with the daemon.
        keep_manifests: manifests that `clean` keeps, besides the newest.
        where: the file of the declaration, for messages.
    """

    name: str
    shards: str
    root: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    root_options: Mapping[str, Any] = field(default_factory=dict)
    partition_pattern: str | None = None
    settle_seconds: float = 30.0  # an upload of one object rarely pauses longer
    description: str = ""
    owners: tuple[str, ...] = ()
    layout: MemberRules = field(default_factory=MemberRules)
    materialize: str = "read"
    on_materialize_error: str = "keep"
    on_damaged_shard: Literal["fail", "salvage"] = "fail"
    max_content_bytes: int = 256 << 20  # an item is held in memory, a few times over while it is packed
    annotators: tuple[Mapping[str, Any], ...] = ()
    filters: tuple[Mapping[str, Any], ...] = ()
    on_empty_sample: str = "drop"
    renumber: bool = False
    parquet: ParquetOptions = field(default_factory=ParquetOptions)
    pack: str | Mapping[str, Any] | None = None
    on_misaligned: str = "warn"
    batch_bytes: int = 8 << 20
    runs_per_tick: int = 25
    cron: str = "*/15 * * * *"
    poll_seconds: int = 30
    run_sensor: bool = False
    run_schedule: bool = False
    keep_manifests: int = 3
    where: str = "arguments"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, where: str, base: Path | None = None, default_root: str | None = None
    ) -> DatasetSpec:
        """Checks a declaration.

        Args:
            config: keys and values as YAML gives them.
            where: the file of the declaration, for messages.
            base: folder that relative local paths of `shards` count from; None leaves them as they are.
            default_root: storage root where the declaration names none.

        Raises:
            ConfigError: a key is unknown or missing, or a value is not allowed.
        """
        keys = _Keys(config, where, "")
        name = keys.matching("name", DATASET_NAME, "letters, digits and _, starting with a letter")
        shards = _below(keys.text("shards"), base)
        if "root" in config and config["root"] is None:
            raise ConfigError(where, "root", "is empty: is the environment variable that it names set?")
        root = keys.optional("root", keys.text, default_root)
        if root is None:
            raise ConfigError(where, "root", "is missing: a folder or URL for the dataset's files")
        spec = cls(
            name=name,
            shards=shards,
            root=root,
            storage_options=keys.optional("storage_options", keys.mapping, {}),
            source=keys.optional("source", keys.text, None),
            root_options=keys.optional("root_options", keys.mapping, {}),
            partition_pattern=keys.optional("partition_pattern", keys.pattern, None),
            settle_seconds=keys.optional("settle_seconds", keys.number, 30.0),
            description=keys.optional("description", keys.text, ""),
            owners=keys.optional("owners", keys.owners, ()),
            layout=_layout(keys.optional("samples", keys.mapping, {}), where),
            materialize=keys.choice("materialize", MATERIALIZE_MODES, "read"),
            on_materialize_error=keys.choice("on_materialize_error", ON_ERROR, "keep"),
            on_damaged_shard=cast(Literal["fail", "salvage"], keys.choice("on_damaged_shard", ON_DAMAGE, "fail")),
            max_content_bytes=keys.integer("max_content_bytes", 256 << 20, least=1),
            annotators=keys.optional("annotators", keys.mappings, ()),
            filters=keys.optional("filters", keys.mappings, ()),
            on_empty_sample=keys.choice("on_empty_sample", ON_EMPTY, "drop"),
            renumber=keys.optional("renumber", keys.boolean, False),
            parquet=_parquet(keys.optional("parquet", keys.mapping, {}), where),
            pack=_tokenizers_below(keys.optional("pack", keys.text_or_mapping, None), base),
            on_misaligned=keys.choice("on_misaligned", ON_MISALIGNED, "warn"),
            batch_bytes=keys.integer("batch_bytes", 8 << 20, least=1 << 16),
            runs_per_tick=keys.integer("runs_per_tick", 25, least=1),
            cron=keys.optional("cron", keys.text, "*/15 * * * *"),
            poll_seconds=keys.integer("poll_seconds", 30, least=1),
            run_sensor=keys.optional("run_sensor", keys.boolean, False),
            run_schedule=keys.optional("run_schedule", keys.boolean, False),
            keep_manifests=keys.integer("keep_manifests", 3, least=1),
            where=where,
        )
        keys.finish()
        spec._check_processing()
        return spec

    def _check_processing(self) -> None:
        from mm_assets.packing.presets import check_pack_config
        from mm_assets.rows.base import source_formats

        source_formats(self.source, where=self.where)
        for number, config in enumerate(self.annotators):
            build_annotator(config, where=self.where, key=f"annotators[{number}]")
        for number, config in enumerate(self.filters):
            build_filter(config, where=self.where, key=f"filters[{number}]")
        check_pack_config(self.pack, where=self.where)

    @property
    def declared(self) -> dict[str, Any]:
        """The settings that decide the dataset's schema: change them and the schema must be decided anew."""
        layout = self.layout
        return {
            "samples": {
                "user_columns": None if layout.user_columns is None else list(layout.user_columns),
                "per_image_fields": list(layout.per_image_fields),
                "per_text_fields": list(layout.per_text_fields),
                "extensions": dict(sorted(layout.extensions.items())),
            },
            "annotators": [dict(a) for a in self.annotators],
            "pack": dict(self.pack) if isinstance(self.pack, Mapping) else self.pack,
            **({} if self.source is None else {"source": self.source}),
        }


def _below(url: str, base: Path | None) -> str:
    if base is None or not is_local(url):
        return url
    path = Path(url.split("://", 1)[-1] if "://" in url else url).expanduser()
    return str(path if path.is_absolute() else base / path)


def _tokenizers_below(value: Any, base: Path | None) -> Any:
    """A declaration in which the files of tokenizers count from the folder of the declaration, as its shards do."""
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


def _layout(config: Mapping[str, Any], where: str) -> MemberRules:
    keys = _Keys(config, where, "samples.")
    if "fields" in config and "user_columns" in config:
        raise ConfigError(where, "samples.fields", "is another name of samples.user_columns: give one of them")
    named = "fields" if "fields" in config else "user_columns"
    columns = keys.optional(named, keys.texts, None)
    for column in columns or ():
        if column in RESERVED_COLUMNS:
            detail = f"{column!r} is a reserved column; not allowed: {', '.join(sorted(RESERVED_COLUMNS))}"
            raise ConfigError(where, f"samples.{named}", detail)
    layout = MemberRules(
        sample_id_field=keys.optional("sample_id_field", keys.text, None),
        texts_field=keys.optional("texts_field", keys.text, "texts"),
        images_field=keys.optional("images_field", keys.text, "images"),
        image_member_field=keys.optional("image_member_field", keys.text, None),
        user_columns=columns,
        per_image_fields=keys.optional("per_image_fields", keys.texts, ()),
        per_text_fields=keys.optional("per_text_fields", keys.texts, ()),
        extensions=keys.optional("extensions", keys.extensions, {}),
        allow_references=keys.optional("allow_references", keys.boolean, False),
        allowed_references=keys.optional("allowed_references", keys.texts, ()),
        max_text_bytes=keys.integer("max_text_bytes", 16 << 20, least=1),
    )
    keys.known.update({"fields", "user_columns"})
    keys.finish()
    return layout


def _parquet(config: Mapping[str, Any], where: str) -> ParquetOptions:
    keys = _Keys(config, where, "parquet.")
    options = ParquetOptions(
        compression=keys.choice("compression", COMPRESSIONS, "zstd"),
        row_group_bytes=keys.integer("row_group_bytes", 32 << 20, least=1 << 16),
    )
    keys.finish()
    return options


class _Keys:
    """Reads typed values out of one mapping and remembers which keys there are."""

    def __init__(self, config: Mapping[str, Any], where: str, prefix: str) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(
                where, prefix.rstrip(".") or "declaration", f"is {_kind(config)}, expected keys and values"
            )
        self.config = config
        self.where = where
        self.prefix = prefix
        self.known: set[str] = set()

    def fail(self, key: str, detail: str) -> ConfigError:
        return ConfigError(self.where, self.prefix + key, detail)

    def finish(self) -> None:
        for key in self.config:
            if key not in self.known:
                raise self.fail(str(key), f"is not a setting; allowed here: {', '.join(sorted(self.known))}")

    def _get(self, key: str) -> Any:
        self.known.add(key)
        if key not in self.config:
            raise self.fail(key, "is missing")
        return self.config[key]

    def optional(self, key: str, read: Any, default: Any) -> Any:
        self.known.add(key)
        if self.config.get(key) is None:
            return default
        return read(key)

    def _typed(self, key: str, kind: type[_T] | tuple[type, ...], expected: str) -> Any:
        value = self._get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(key, f"is {_kind(value)}, expected {expected}")
        return value

    def text(self, key: str) -> str:
        value: str = self._typed(key, str, "text")
        if not value.strip():
            raise self.fail(key, "is empty, expected text")
        return value

    def boolean(self, key: str) -> bool:
        return bool(self._typed(key, bool, "true or false"))

    def number(self, key: str) -> float:
        value = float(self._typed(key, (int, float), "a number of at least 0"))
        if not 0 <= value < float("inf"):
            raise self.fail(key, f"is {value}, expected a number of at least 0")
        return value

    def integer(self, key: str, default: int, *, least: int) -> int:
        self.known.add(key)
        if self.config.get(key) is None:
            return default
        value = self._typed(key, int, f"a whole number of at least {least}")
        if value < least:
            raise self.fail(key, f"is {value}, expected a whole number of at least {least}")
        return int(value)

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        self.known.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if value not in allowed:
            raise self.fail(key, f"is {value!r}, allowed: {', '.join(allowed)}")
        return str(value)

    def matching(self, key: str, pattern: re.Pattern[str], expected: str) -> str:
        value = self.text(key)
        if not pattern.fullmatch(value):
            raise self.fail(key, f"is {value!r}, expected {expected}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._typed(key, Mapping, "keys and values")
        for name in value:
            if not isinstance(name, str):
                raise self.fail(key, f"has the key {name!r}, expected text keys")
        return dict(value)

    def mappings(self, key: str) -> tuple[dict[str, Any], ...]:
        value = self._typed(key, (list, tuple), "a list")
        for number, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self.fail(f"{key}[{number}]", f"is {_kind(item)}, expected keys and values with a `type`")
        return tuple(dict(item) for item in value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._typed(key, (list, tuple), "a list of texts")
        for number, item in enumerate(value):
            if not isinstance(item, str) or not item:
                raise self.fail(f"{key}[{number}]", f"is {_kind(item)}, expected text")
        if len(set(value)) != len(value):
            raise self.fail(key, "names something twice")
        return tuple(value)

    def text_or_mapping(self, key: str) -> str | dict[str, Any]:
        value = self._typed(key, (str, Mapping), "a preset's name, or keys and values")
        return value if isinstance(value, str) else dict(value)

    def extensions(self, key: str) -> dict[str, str]:
        mapping = self.mapping(key)
        for extension, modality in mapping.items():
            if extension != extension.lower() or extension.startswith(".") or not extension:
                raise self.fail(f"{key}.{extension}", "is no extension: write it in lower case, without the dot")
            if not isinstance(modality, str) or not DATASET_NAME.fullmatch(modality) or modality == "metadata":
                raise self.fail(f"{key}.{extension}", f"is {modality!r}, expected the name of a row modality")
        return mapping

    def owners(self, key: str) -> tuple[str, ...]:
        value = self.texts(key)
        for owner in value:
            if not OWNER.fullmatch(owner):
                raise self.fail(key, f"has {owner!r}, expected e-mail addresses or team:name")
        return value

    def pattern(self, key: str) -> str:
        value = self.text(key)
        try:
            compiled = re.compile(value)
        except re.error as error:
            raise self.fail(key, f"is no regular expression: {error}") from error
        if "partition" not in compiled.groupindex and compiled.groups != 1:
            raise self.fail(key, f"has {compiled.groups} groups, expected one, or one named `partition`")
        return value


def _kind(value: object) -> str:
    return "empty" if value is None else f"{type(value).__name__} {value!r}"
