"""The tables of the pipeline: their columns, and what a declaration and a sample of the shards decide about them.

`MULTIMODAL_SCHEMA` is the contract of every row table; a `DatasetSchema` adds the dataset's user columns and is decided
once, at registration. Not-null columns are `required` in the Parquet files too. Nothing here reads or writes data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import pyarrow as pa
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from mm_assets.errors import SchemaMismatchError
from mm_assets.sources.encodings import is_encoding
from mm_assets.sources.member import required

__all__ = [
    "ALL_FILTERED",
    "COLUMN_DESCRIPTIONS",
    "COLUMN_TYPES",
    "DECODABLE",
    "DROPPED_SCHEMA",
    "EMPTY_SAMPLE",
    "FILE_COLUMN",
    "HARMLESS_REJECTS",
    "KEPT",
    "MATERIALIZE",
    "METADATA_POSITION",
    "MISALIGNED",
    "MODALITIES",
    "MULTIMODAL_SCHEMA",
    "PACKABLE",
    "PIPELINE_FILTERS",
    "QUERY_COLUMNS",
    "REJECTS_SCHEMA",
    "RESERVED_COLUMNS",
    "ROW_IDENTITY",
    "SOURCE_SCHEMA",
    "UNDECODABLE_SCHEMA",
    "DatasetSchema",
    "Drop",
    "MemberRules",
    "PdfRows",
    "Settings",
    "Text",
    "Texts",
    "UserColumn",
    "free_name",
]


_COLUMNS: tuple[tuple[pa.Field, str], ...] = (
    (required("sample_id", pa.string()), "unique document or sample identifier"),
    (required("position", pa.int32()), "position within the sample, -1 for its metadata row"),
    (required("modality", pa.string()), "kind of row"),
    (pa.field("content_type", pa.string()), "MIME type, detected from the bytes where they are available"),
    (pa.field("text_content", pa.string()), "text of text rows"),
    (pa.field("binary_content", pa.large_binary()), "bytes of media rows"),
    (pa.field("source_ref", pa.string()), "JSON locator of the original content"),
    (pa.field("metadata_json", pa.string()), "the sample's whole JSON, on its metadata row"),
    (pa.field("materialize_error", pa.string()), "why the bytes could not be read"),
)

MULTIMODAL_SCHEMA: pa.Schema = pa.schema([field for field, _ in _COLUMNS])
"""The first columns of every row table, in order (docs/spec/pipeline.md, "Row schema"); each name is reserved."""

_FILE = pa.struct(
    [
        ("uri", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("content_type", pa.string()),
        ("checksum", pa.string()),
        ("inline", pa.large_binary()),
    ]
)
_MEMBER = pa.struct([("container", pa.string()), ("member", pa.string()), ("frame_index", pa.int32())])
_SOURCE_COLUMNS: tuple[tuple[pa.Field, str], ...] = (
    (pa.field("source", _FILE), "the bytes that source_ref locates, as a FILE of Parquet"),
    (pa.field("source_member", _MEMBER), "the member and the frame that source_ref names"),
)

SOURCE_SCHEMA: pa.Schema = pa.schema([field for field, _ in _SOURCE_COLUMNS])
"""The columns after those of `MULTIMODAL_SCHEMA` in the tables of a dataset: `source_ref` as structs.

`source` has the fields of Parquet's logical type FILE, so that other programs find the bytes; `source_member` has what
FILE has no field for. `mm_assets.rows.file_columns` makes them.
"""

COLUMN_DESCRIPTIONS: Mapping[str, str] = {field.name: text for field, text in (*_COLUMNS, *_SOURCE_COLUMNS)}
"""What each reserved column holds; not in the schema itself, which is part of the Parquet files."""

RESERVED_COLUMNS: frozenset[str] = frozenset((*MULTIMODAL_SCHEMA.names, *SOURCE_SCHEMA.names))

SIZE_COLUMN, CHECKSUM_COLUMN = "binary_content_size", "binary_content_crc32c"
FILE_COLUMN = "mm_assets_file"
QUERY_COLUMNS: frozenset[str] = frozenset({"partition", FILE_COLUMN, "file_row_number", SIZE_COLUMN, CHECKSUM_COLUMN})
"""Columns that the tables of a stage, or queries over them, add to a row table (docs/spec/pipeline.md, Row schema)."""

ROW_IDENTITY = ("sample_id", "position", "modality")
"""The columns that tell the rows of a row table apart."""

METADATA_POSITION = -1  # position of a sample's one metadata row; content rows count from 0

MODALITIES: frozenset[str] = frozenset({"metadata", "text", "image", "audio", "video", "array", "midi", "binary"})
"""Row modalities that the pipeline itself produces; `MemberRules.extensions` may name more."""

REJECTS_SCHEMA: pa.Schema = pa.schema(
    [
        required("shard", pa.string()),
        pa.field("sample_id", pa.string()),
        pa.field("member", pa.string()),
        required("stage", pa.string()),
        required("reason", pa.string()),
        required("detail", pa.string()),
    ]
)
"""The entries that did not become a row, and why."""

HARMLESS_REJECTS: frozenset[str] = frozenset({"directory", "device", "documentation", "resource fork", "system file"})
"""Reasons of rejects that cannot have been data: they have no content, or an operating system made them."""

DROPPED_SCHEMA: pa.Schema = pa.schema(
    [
        required("sample_id", pa.string()),
        required("position", pa.int32()),
        required("modality", pa.string()),
        required("filter", pa.string()),
        required("reason", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("detail", pa.string()),
    ]
)
"""One row per row that a filter or an error policy took out."""

UNDECODABLE_SCHEMA: pa.Schema = pa.schema(
    [
        required("sample_id", pa.string()),
        required("position", pa.int32()),
        required("modality", pa.string()),
        pa.field("member", pa.string()),
        pa.field("source_ref", pa.string()),
        pa.field("content_type", pa.string()),
        required("field", pa.string()),
        required("reason", pa.string()),
        required("detail", pa.string()),
        required("action", pa.string()),
    ]
)
"""One row per media item that no reader can decode, whatever became of it, and per content packed with a fault.

`field` is the packed modality that refused it or would hold it, `detail` its field's message. `reason` is
``undecodable``, and `action` then the policy that was applied: ``drop_row``, ``drop_sample`` or ``keep``. Otherwise
`action` is ``keep``, and `reason` ``refused``, of content in the rest and of a value of the JSON that is absent, or
``omitted``, of content that its field takes in part. A row stands once for each `reason` and `field`.
"""

_SCALARS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
}

COLUMN_TYPES: dict[str, pa.DataType] = {
    **_SCALARS,
    "json": pa.string(),  # any other JSON value, as its JSON text
    **{f"list<{name}>": pa.list_(kind) for name, kind in _SCALARS.items()},
}
"""Type names of user columns and the Arrow type of each."""

_NAME = re.compile(r"[^\x00-\x1f]+")
_MODALITY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

MATERIALIZE, DECODABLE, PACKABLE = "materialize", "decodable", "packable"
MISALIGNED, EMPTY_SAMPLE = "misaligned", "empty_sample"
ALL_FILTERED = "all_filtered"  # reason of an empty sample whose content was dropped by declared filters alone
KEPT = "kept"  # starts the reasons of faults that keep nothing from being packed
PIPELINE_FILTERS: frozenset[str] = frozenset({MATERIALIZE, DECODABLE, PACKABLE, MISALIGNED, EMPTY_SAMPLE, KEPT})
"""What starts a reason that the pipeline itself writes; no declared filter may take such a name."""


class Drop(NamedTuple):
    """One row that a filter takes out.

    Attributes:
        row: index of the row in the judged block.
        reason: short slug that is counted, such as ``below_min``.
        value: the measure that decided, in the unit that the filter documents; None where there is none.
        detail: why, in words, where the reason is not enough.
    """

    row: int
    reason: str
    value: float | None
    detail: str | None = None


def free_name(name: str, used: Collection[str]) -> str:
    """Returns a column's name that is not used: itself, else ``user_<name>``, else that with a number.

    Args:
        name: the preferred one.
        used: names in the form of `str.casefold`: SQL does not see the case of letters.
    """
    renamed = (f"user_{name}" if number == 1 else f"user_{name}_{number}" for number in count(1))
    return next(free for free in chain([name], renamed) if free.casefold() not in used)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserColumn:
    """One column in addition to the reserved ones.

    Attributes:
        name: column name; never a reserved one.
        source: key in the sample's JSON that fills it; empty for a column that an annotator fills.
        type: a name of `COLUMN_TYPES`.
        rows: the row modality that carries it: "metadata", or "image" and "text" for per-item lists; "" for any row.
        required: named explicitly in the declaration: missing in a whole shard fails the partition.
    """

    name: str
    source: str
    type: str
    rows: str = "metadata"
    required: bool = False

    def __post_init__(self) -> None:
        if self.type not in COLUMN_TYPES:
            raise SchemaMismatchError(f"column {self.name!r}: type {self.type!r} is none of {sorted(COLUMN_TYPES)}")
        if self.name in RESERVED_COLUMNS:
            raise SchemaMismatchError(f"column {self.name!r} has a reserved name")
        if not _NAME.fullmatch(self.name):
            raise SchemaMismatchError(f"column name {self.name!r} is empty or holds control characters")

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type that `type` names."""
        return COLUMN_TYPES[self.type]

    def to_json(self) -> dict[str, Any]:
        """The column as it is in `schema.json`."""
        return asdict(self)


def _unique(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(texts)) != len(texts):
        raise ValueError("names something twice")
    return texts


Text = Annotated[str, Field(pattern=r"\S")]
"""A text that is not blank."""

Texts = Annotated[
    tuple[Text, ...], Field(strict=False, json_schema_extra={"uniqueItems": True}), AfterValidator(_unique)
]
"""A list of different texts."""


PdfRows = Literal["binary", "document", "interleaved"]
"""What the rows of a PDF are: its bytes; its layout and an image per page; or a text and an image per page."""


class Settings(BaseModel):
    """Settings of a declaration: immutable, no unknown keys, and values that have the required type without conversion.

    The type, default, bounds, description and an example of each key are only in the model: messages, the schema of
    the Dagster component and the tables of docs/settings.md are generated from it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, given: Any) -> Any:
        """Removes keys without a value (``filters:`` and nothing after it), so that they take their default."""
        if not isinstance(given, Mapping):
            return given
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: value for key, value in given.items() if value is not None or key not in optional}


def _check_extension(extension: str) -> str:
    if extension != extension.lower() or extension.startswith(".") or not extension:
        raise ValueError("is not an extension: write it in lower case, without the dot")
    return extension


def _check_roles(roles: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for role in roles or ():
        if "." in role or "/" in role:
            raise ValueError(f"has {role!r}, expected parts of a name between two dots: list each by itself")
    return roles


def _check_encoding(encoding: str) -> str:
    if encoding != "auto" and not is_encoding(encoding):
        raise ValueError(f"is {encoding!r}, expected `auto` or the name of an encoding, such as cp932 or latin-1")
    return encoding


def _check_modality(modality: str) -> str:
    if not _MODALITY_NAME.fullmatch(modality) or modality == "metadata":
        raise ValueError(f"is {modality!r}, expected the name of a row modality")
    return modality


def _add_alias(schema: dict[str, Any]) -> None:
    """Adds the other name of `user_columns` to the JSON schema; pydantic lists the first of several names only."""
    alias = {"description": "Another name of `user_columns`."}
    schema["properties"]["fields"] = schema["properties"]["user_columns"] | alias


class MemberRules(Settings):
    """How the members of one key become the rows of one sample."""

    model_config = ConfigDict(json_schema_extra=_add_alias)

    sample_id_field: Text | None = Field(
        default=None,
        description="Key of the sample's JSON that holds its id: a text, or a whole number. Without it, and in "
        "samples that lack it, the member key is the id.",
        examples=["url"],
    )
    texts_field: Text = Field(default="texts", description="Key of the list of texts.", examples=["paragraphs"])
    images_field: Text = Field(default="images", description="Key of the list of image tokens.", examples=["pictures"])
    image_member_field: Text | None = Field(
        default=None,
        description='Key that names the member of an image: in a token that is an object, `{"file": "x.1.png"}`; '
        "else in the sample's JSON, for all tokens that do not name a member, as frames of that member in order.",
        examples=["file"],
    )
    user_columns: Texts | None = Field(
        default=None,
        validation_alias=AliasChoices("user_columns", "fields"),
        description="Keys of the JSON that become columns of the metadata row; `fields` is another name of this "
        "setting. A shard in which no sample has one of them fails; `[]` makes none. Default: every key in a sample "
        "of the shards, at most 512, except those that these settings name.",
        examples=[["url", "language"]],
    )
    per_image_fields: Texts = Field(
        default=(),
        description="Keys whose lists go to the image rows: entry k to the k-th image, or, if the list is as long as "
        "that of the tokens, nulls included, each to its position.",
        examples=[["image_metadata"]],
    )
    per_text_fields: Texts = Field(
        default=(),
        description="Keys whose lists go to the text rows, in the same way.",
        examples=[["language_scores"]],
    )
    extensions: Mapping[
        Annotated[str, AfterValidator(_check_extension)], Annotated[str, AfterValidator(_check_modality)]
    ] = Field(
        default={},
        description="Extension (lower case, no dot) to row modality, before the built-in table; new modalities may "
        "be named. `<key>.json` is always the metadata.",
        examples=[{"md": "text", "pt": "array"}],
    )
    roles: Annotated[Texts | None, AfterValidator(_check_roles)] = Field(
        default=None,
        description="Roles that names of members may have, each a part directly before the extension: a text, or a "
        "pattern (`*`, `?`, `[abc]`; `#` for an integer). With it a key ends before them or, if there are none, at the "
        "last dot, so that keys may have dots; `[]`: names have no roles. Default: a key ends at the first dot of the "
        "base name, and the role is all that is between it and the extension (docs/pipeline.md). Not for Parquet.",
        examples=[["rgb", "depth"]],
    )
    allow_references: bool = Field(
        default=False,
        description="Image tokens may be URLs or absolute paths below `allowed_references`.",
        examples=[True],
    )
    allowed_references: Texts = Field(
        default=(),
        description="Prefixes of the URLs and paths that image tokens, and the `path` of a `source_ref`, may point "
        "to. Only applies with `allow_references: true`.",
        examples=[["https://images.example.org/"]],
    )
    encoding: Annotated[Text, AfterValidator(_check_encoding)] = Field(
        default="auto",
        description="Encoding of the texts that are not UTF-8: a name of Python's codecs. With `auto` a text is UTF-8, "
        "UTF-16 or UTF-32, or it is rejected (docs/pipeline.md). A declared UTF-16 or UTF-32 is that of all texts.",
        examples=["cp932"],
    )
    pdf: Literal["auto", "binary", "document", "interleaved"] = Field(
        default="auto",
        description="What becomes of PDFs (docs/sources.md). `document`: an image per page, and the words and boxes "
        "of all; `interleaved`: a text and an image per page; `binary`: their bytes. `auto`: pages, if most of the "
        "sampled samples consist of a PDF, the extra `pdf` is installed, and `pack` does not ask for something else.",
        examples=["document"],
    )
    pdf_dpi: int = Field(
        default=150, ge=24, le=1200, description="Pixels per inch of the images of a PDF's pages.", examples=[200]
    )
    max_text_bytes: int = Field(
        default=16 << 20,
        ge=1,
        description="A larger JSON or text member is rejected as `too_large`, and a PDF with more words and boxes as "
        "`pdf_too_large`; in bytes.",
        examples=[1 << 20],
    )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes that references may point to: none unless references are allowed."""
        return self.allowed_references if self.allow_references else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSchema:
    """What registration decided about a dataset; every partition conforms to it, so that a manifest joins them.

    Attributes:
        user_columns: columns of the row tables beside the reserved ones, in order.
        annotator_columns: columns that annotators add to the filtered rows, in order.
        pack: the pack plan as JSON (see `mm_assets.packing.pack.PackPlan`).
        pdf: what the rows of PDFs are.
        evidence: what the decision rests on, as `schema.json` has it; no part of what is compared or digested.
    """

    user_columns: tuple[UserColumn, ...] = ()
    annotator_columns: tuple[UserColumn, ...] = ()
    pack: Mapping[str, Any] = field(default_factory=dict)
    pdf: PdfRows = "binary"
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False)

    VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for column in (*self.user_columns, *self.annotator_columns):
            if column.name in seen:
                raise SchemaMismatchError(f"two columns are named {column.name!r}")
            seen.add(column.name)

    def row_schema(self) -> pa.Schema:
        """Columns of `rows` and `materialized_rows`: the reserved ones, then the user's."""
        user = (pa.field(column.name, column.arrow_type) for column in self.user_columns)
        return pa.schema([*MULTIMODAL_SCHEMA, *SOURCE_SCHEMA, *user])

    def filtered_schema(self) -> pa.Schema:
        """Columns of `filtered_rows`: those of the rows, then the annotators'."""
        return pa.schema([*self.row_schema(), *(pa.field(c.name, c.arrow_type) for c in self.annotator_columns)])

    def to_json(self) -> dict[str, Any]:
        """The content of `schema.json`, without the evidence."""
        return {
            "version": self.VERSION,
            "user_columns": [c.to_json() for c in self.user_columns],
            "annotator_columns": [c.to_json() for c in self.annotator_columns],
            "pack": dict(self.pack),
            **({} if self.pdf == "binary" else {"pdf": self.pdf}),  # as releases that knew no other
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> DatasetSchema:
        """Reads `schema.json` back.

        A column of the user's that has the name of one in `SOURCE_SCHEMA`, which earlier releases did not have, gets
        the name that it would have been given.

        Raises:
            SchemaMismatchError: `value` has another version or another shape.
        """
        version = value.get("version")
        if version != cls.VERSION:
            raise SchemaMismatchError(f"{where}: version {version!r}, this release reads {cls.VERSION}")
        pdf = value.get("pdf", "binary")
        if pdf not in get_args(PdfRows):
            raise SchemaMismatchError(f"{where}: pdf is {pdf!r}, expected one of {', '.join(get_args(PdfRows))}")
        try:
            columns = [{**column} for column in value["user_columns"]]
            for column in columns:
                if column["name"].casefold() in SOURCE_SCHEMA.names:
                    used = {*SOURCE_SCHEMA.names, *(other["name"].casefold() for other in columns)}
                    column["name"] = free_name(column["name"], used)
            return cls(
                user_columns=tuple(UserColumn(**column) for column in columns),
                annotator_columns=tuple(UserColumn(**c) for c in value["annotator_columns"]),
                pack=dict(value["pack"]),
                pdf=pdf,
                evidence=dict(value.get("evidence") or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SchemaMismatchError(f"{where}: not a dataset schema: {error}") from error

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON, hexadecimal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()
