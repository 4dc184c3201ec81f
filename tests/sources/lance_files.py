"""Writes Lance datasets with Lance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

BLOB = {"lance-encoding:blob": "true"}


def write(path: Path, table: pa.Table, blobs: Sequence[str] = (), **options: Any) -> None:
    """Writes a table, with columns that are blobs."""
    import lance

    fields = [field.with_metadata(BLOB) if field.name in blobs else field for field in table.schema]
    lance.write_dataset(table.cast(pa.schema(fields)), str(path), **options)


def write_references(path: Path, keys: Sequence[str], values: Sequence[bytes | str | None]) -> None:
    """Writes blobs: bytes, or texts that name files elsewhere."""
    import lance

    schema = pa.schema([pa.field("__key__", pa.string()), lance.blob_field("jpg")])
    table = pa.table([pa.array(keys), lance.blob_array(list(values))], schema=schema)
    lance.write_dataset(table, str(path), allow_external_blob_outside_bases=True)


def change(path: Path, *, delete: str = "", add: str = "", clone: Path | None = None) -> None:
    """Deletes the rows of an expression, adds a column `more` of an expression, or clones without copying."""
    import lance

    dataset = lance.dataset(str(path))
    if delete:
        dataset.delete(delete)
    if add:
        dataset.add_columns({"more": add})
    if clone:
        dataset.shallow_clone(str(clone), dataset.version)
