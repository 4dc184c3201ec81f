"""Describes a dataset for users and catalogs: a README, and Croissant 1.1 (https://docs.mlcommons.org/croissant).

The content comes from the manifest, the metadata records of packed files, and two columns of the table
`filtered_rows`; no media is read. The same version of a dataset gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.dataset import open as open_dataset
from mm_assets.dataset.manifest import FILE_DIGITS, Manifest, file_path
from mm_assets.errors import ConfigError, SourceError, first_line
from mm_assets.fields.measures import UNITS, measures
from mm_assets.summaries import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from mm_assets.storage.urls import Options

__all__ = ["CROISSANT_NAME", "README_NAME", "DatasetCard", "dataset_card"]

CROISSANT_NAME, README_NAME = "croissant.json", "README.md"
MAX_LICENSES = 20  # the most frequent are listed
MAX_LOSSES = 20  # the most frequent kinds are listed

_TABLE = "filtered_rows"
_TABLE_FILES = f"{_TABLE}_files"  # the files; the record set has the id `_TABLE`
_LICENSE_COLUMNS = ("license", "licence", "license_name", "license_url")
_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
_SIZE_NAMES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")
"""Hugging Face's names for ranges of the number of samples."""
_MEDIA_TYPES = {"image": "sc:ImageObject", "audio": "sc:AudioObject", "video": "sc:VideoObject"}
_TEXT = "sc:Text"
_BINARY, _PARQUET = "application/octet-stream", "application/x-parquet"
_ENCODINGS = {"webdataset": "application/x-tar", "energon": "application/x-tar", "parquet": _PARQUET, "hf": _PARQUET}
_GLOB = re.compile(r"([*?\[])")  # special characters in patterns of file names
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|!&]")
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


class DatasetCard(NamedTuple):
    """Two descriptions of a dataset.

    Attributes:
        croissant: JSON-LD, for a file `CROISSANT_NAME` in the dataset's folder.
        readme: Markdown with the header that Hugging Face reads, for a file `README_NAME` there.
    """

    croissant: Mapping[str, Any]
    readme: str

    def files(self) -> dict[str, bytes]:
        """Returns the content of both files by name."""
        croissant = json.dumps(self.croissant, indent=1, ensure_ascii=False) + "\n"
        return {CROISSANT_NAME: croissant.encode(), README_NAME: self.readme.encode()}


class _Range(NamedTuple):
    """Statistics of a measure."""

    unit: str
    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modality:
    name: str
    field: str
    present: int
    num_bytes: int
    ranges: Mapping[str, _Range]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The content of both descriptions."""

    name: str
    description: str
    license: str | None
    url: str | None
    digest: str | None
    num_samples: int
    modalities: Sequence[_Modality]
    licenses: Mapping[str, int]
    rows: Mapping[str, int]
    losses: Sequence[tuple[str, str, int]]
    settings: Mapping[str, Any]


def dataset_card(
    dataset: Dataset | str | os.PathLike[str],
    *,
    license: str | None = None,
    description: str | None = None,
    url: str | None = None,
    cite_as: str | None = None,
    date_published: str | None = None,
    shards: tuple[str, Sequence[str]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetCard:
    """Describes a version of a dataset.

    Args:
        dataset: an open dataset, or its manifest, folder or packed file.
        license: the license of the whole dataset, an SPDX identifier or a URL; None lists the licenses of its samples.
        description: one or several sentences; None gives the number of samples and the modalities.
        url: where the dataset is published.
        cite_as: how it is cited, such as a BibTeX entry.
        date_published: an ISO 8601 date.
        shards: the format and the file names of an export, which replace packed files and tables in the description.
        storage_options: arguments for the file system of `dataset`.

    Raises:
        FormatError: the manifest, a packed file or a table is damaged.
        SourceError: a file cannot be read.
    """
    with ExitStack() as stack:
        if not isinstance(dataset, Dataset):
            dataset = stack.enter_context(open_dataset(dataset, storage_options=storage_options))
        elif storage_options is not None:
            raise ConfigError(
                "arguments", "storage_options", "is for a path, but an open dataset has its own: leave it out"
            )
        facts = _facts(dataset, license=license, description=description, url=url)
        is_whole = dataset.manifest is not None and dataset.selection is None
        if shards is not None:
            files = {"distribution": [_file_set("shards", shards[1], _ENCODINGS.get(shards[0], _BINARY))]}
        elif is_whole and dataset.manifest is not None:
            files = _files_of(dataset.manifest, facts, dataset.storage_options)
        else:
            files = {"distribution": []}
        more = {"citeAs": cite_as, "datePublished": date_published}
        croissant = _croissant(facts) | {key: value for key, value in more.items() if value} | files
        return DatasetCard(croissant, _readme(facts, cite_as, None if shards is None else shards[0]))


# -- facts


def _facts(dataset: Dataset, *, license: str | None, description: str | None, url: str | None) -> _Facts:
    manifest = dataset.manifest
    document: Mapping[str, Any] = {}
    digest = None
    licenses, rows = Counter[str](), Counter[str]()
    if manifest is not None:
        from mm_assets.storage.files import SourceFile

        with SourceFile(manifest.name, dataset.storage_options) as file:
            content = file.read(0, file.size)
        document, digest = json.loads(content), hashlib.sha256(content).hexdigest()
        if dataset.selection is None and _TABLE in manifest.table_digests:
            for table in manifest.tables(_TABLE):
                _count(table, dataset.storage_options, licenses, rows)
    losses = document.get("losses", {})
    name = PurePosixPath(dataset.path if manifest is None else manifest.dataset).name
    return _Facts(
        name=name or "dataset",
        description=description or f"{counted(len(dataset), 'sample')} with {', '.join(dataset.names)}.",
        license=license,
        url=url,
        digest=digest,
        num_samples=len(dataset),
        modalities=[_modality(dataset, modality) for modality in dataset.names],
        licenses=dict(licenses.most_common(MAX_LICENSES)),
        rows=dict(sorted(rows.items())),
        losses=sorted(
            ((stage, reason, loss["count"]) for stage, reasons in losses.items() for reason, loss in reasons.items()),
            key=lambda loss: (-loss[2], loss[:2]),
        )[:MAX_LOSSES],
        settings=document.get("settings", {}),
    )


def _count(table: str, storage_options: Options | None, licenses: Counter[str], rows: Counter[str]) -> None:
    """Counts the rows of a table by kind, and the licenses of its samples.

    Raises:
        SourceError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from mm_assets.storage.files import SourceFile

    try:
        with SourceFile(table, storage_options) as file, pq.ParquetFile(file.open()) as parquet:
            types = {field.name: field.type for field in parquet.schema_arrow}
            column = next((name for name in _LICENSE_COLUMNS if types.get(name) == pa.string()), None)
            for batch in parquet.iter_batches(columns=["modality"] if column is None else ["modality", column]):
                for one in pc.value_counts(batch.column("modality")).to_pylist():
                    rows[one["values"]] += one["counts"]
                if column is not None:
                    texts = batch.column(column).filter(pc.equal(batch.column("modality"), "metadata")).drop_null()
                    for one in pc.value_counts(texts).to_pylist():
                        licenses[one["values"]] += one["counts"]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise SourceError(table, f"cannot be read: {first_line(error)}") from error


def _modality(dataset: Dataset, name: str) -> _Modality:
    field = dataset.fields.get(name)
    if field is None:
        return _Modality(name=name, field="", present=int(dataset.presence(name).sum()), num_bytes=0, ranges={})
    present = num_bytes = 0
    parts_of: dict[str, list[tuple[float, float, float, int]]] = {}
    for records, sizes in dataset.scan_records(name):
        present += len(records)
        num_bytes += int(sizes.sum())
        for measure, numbers in measures(records).items():
            values = np.asarray(numbers, np.float64)
            values = values[np.isfinite(values)]
            if len(values):
                parts_of.setdefault(measure, []).append((values.min(), values.sum(), values.max(), len(values)))
    ranges = {}
    for measure, parts in parts_of.items():
        lows, sums, highs, counts = zip(*parts, strict=True)
        ranges[measure] = _Range(UNITS[measure], min(lows), sum(sums) / sum(counts), max(highs))
    return _Modality(name=name, field=type(field).__name__, present=present, num_bytes=num_bytes, ranges=ranges)


# -- Croissant


def _croissant(facts: _Facts) -> dict[str, Any]:
    licenses = [facts.license] if facts.license else list(facts.licenses)
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": facts.name,
        "description": facts.description,
        **({"license": licenses} if licenses else {}),
        "url": facts.url or f"urn:sha256:{facts.digest or facts.name}",
        "version": f"1.0.0+{facts.digest[:16]}" if facts.digest else "1.0.0",
        "keywords": [modality.name for modality in facts.modalities],
        "variableMeasured": [
            {
                "@type": "sc:PropertyValue",
                "name": f"{modality.name}.{measure}",
                "unitText": span.unit,
                "minValue": span.low,
                "maxValue": span.high,
                "value": span.mean,
            }
            for modality in facts.modalities
            for measure, span in modality.ranges.items()
        ],
    }


def _files_of(manifest: Manifest, facts: _Facts, storage_options: Options | None) -> dict[str, Any]:
    """Returns the descriptions of a version's files, and of the rows of its table."""
    packed = [file_path(manifest.formats[0], one.partition or "", one.sha256 or "") for one in manifest.files]
    distribution = [
        {
            "@type": "cr:FileObject",
            "@id": "manifest",
            "name": "manifest",
            "description": "The files of this version, with the SHA-256 of each packed one.",
            "contentUrl": f"manifests/{facts.digest}.json",
            "encodingFormat": "application/json",
            "sha256": facts.digest,
        },
        _file_set("packed", packed, _BINARY),
    ]
    digests = manifest.table_digests.get(_TABLE)
    if digests is None or not manifest.files:
        return {"distribution": distribution}
    starts = range(0, len(digests), FILE_DIGITS)
    paths = [
        file_path(_TABLE, one.partition or "", digests[start : start + FILE_DIGITS])
        for start, one in zip(starts, manifest.files, strict=True)
    ]
    distribution.append(_file_set(_TABLE_FILES, paths, _PARQUET))
    return {
        "distribution": distribution,
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": _TABLE,
                "name": _TABLE,
                "description": "The rows of the samples: one with the metadata, and one for each content.",
                "field": _table_fields(manifest.tables(_TABLE)[0], facts, storage_options),
            }
        ],
    }


def _file_set(name: str, paths: Sequence[str], encoding: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": name,
        "name": name,
        "encodingFormat": encoding,
        "includes": [_GLOB.sub(r"[\1]", path) for path in paths],
    }


def _table_fields(table: str, facts: _Facts, storage_options: Options | None) -> list[dict[str, Any]]:
    """Returns the columns of a table as fields of records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mm_assets.storage.files import SourceFile

    try:
        with SourceFile(table, storage_options) as file:
            schema = pq.read_schema(file.open())
    except (pa.ArrowException, OSError) as error:
        raise SourceError(table, f"cannot be read: {first_line(error)}") from error
    kinds = facts.rows.keys() - {"metadata", "text"}
    media_type = _MEDIA_TYPES.get(next(iter(kinds)), _TEXT) if len(kinds) == 1 else _TEXT
    fields = []
    for number, column in enumerate(schema):
        if pa.types.is_struct(column.type):  # readers cast cells to texts, and `source_ref` has the same content
            continue
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        kind = column.type.value_type if is_list else column.type
        identity = f"{_TABLE}/{column.name if _ID.fullmatch(column.name) else number}"
        fields.append(
            {
                "@type": "cr:Field",
                "@id": identity,
                "name": column.name,
                "dataType": media_type if column.name == "binary_content" else _type_of(kind),
                **({"isArray": True, "arrayShape": "-1"} if is_list else {}),
                "source": {"fileSet": {"@id": _TABLE_FILES}, "extract": {"column": column.name}},
            }
        )
    return fields


def _type_of(kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        return "sc:Boolean"
    if pa.types.is_integer(kind):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(kind) else _TEXT


# -- README


def _readme(facts: _Facts, cite_as: str | None, export_format: str | None) -> str:
    size = _SIZE_NAMES[bisect_right(_SIZES, facts.num_samples)]
    header = ["---", f"pretty_name: {json.dumps(facts.name)}", "size_categories:", f"- {size}"]
    if facts.license and _SPDX.fullmatch(facts.license):
        header.insert(1, f"license: {facts.license.lower()}")
    lines = [*header, "---", "", f"# {_text(facts.name)}", "", _text(facts.description), ""]
    if facts.license:
        lines += [f"License: {_text(facts.license)}", ""]
    if facts.digest:
        label = f"Format: {export_format}, exported from" if export_format else "Version:"
        lines += [f"{label} `{facts.digest}` (SHA-256 of the manifest).", ""]
    if cite_as:
        lines += ["## Citation", "", *_block(cite_as)]
    lines += ["## Modalities", ""]
    lines += _table(
        ("modality", "field", "samples", "bytes"),
        [(one.name, one.field or "unknown", f"{one.present:,}", f"{one.num_bytes:,}") for one in facts.modalities],
    )
    statistics = [
        (f"{one.name}, {measure}", span.unit, f"{span.low:,.6g}", f"{span.mean:,.6g}", f"{span.high:,.6g}")
        for one in facts.modalities
        for measure, span in one.ranges.items()
    ]
    if statistics:
        lines += ["## Statistics", "", *_table(("what", "unit", "min", "mean", "max"), statistics)]
    if facts.rows:
        lines += ["## Rows", "", *_table(("kind", "rows"), [(kind, f"{n:,}") for kind, n in facts.rows.items()])]
    if facts.licenses:
        counts = [(name, f"{number:,}") for name, number in facts.licenses.items()]
        lines += ["## Licenses of the samples", "", *_table(("license", "samples"), counts)]
    if facts.losses:
        losses = [(stage, reason, f"{number:,}") for stage, reason, number in facts.losses]
        lines += ["## What was left out", "", *_table(("stage", "reason", "items"), losses)]
    if facts.settings:
        settings = json.dumps(facts.settings, indent=1, ensure_ascii=False)
        lines += ["## How it was made", "", "By `mm-assets` with these settings:", ""]
        lines += _block(settings)
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def _block(value: str) -> list[str]:
    """Returns a text as a code block in Markdown."""
    return [*(f"    {line}" for line in value.splitlines()), ""]


def _text(value: str) -> str:
    """Returns a text for Markdown, with markup escaped."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(value.split()))
