"""The `add-stream` command: a modality from a table of values, into one MSTR file or all of a dataset's.

Nothing is written before the table has been read and its ids have been found. What is refused leaves file, markers and
manifest as they were.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mm_assets.errors import ConfigError

if TYPE_CHECKING:
    from mm_assets.dataset.add_stream import Values
    from mm_assets.fields import Field
    from mm_assets.pipeline.store import DatasetStore

__all__ = ["add_stream_options", "run_add_stream", "say_missing_streams"]

_PACKED_NAME = re.compile(r".+\.[0-9a-f]{8}\.mstr")
_SHOWN = 5  # partitions named in one line


def add_stream_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of the command, beside those that name datasets."""
    options = (
        click.argument("file", required=False),
        click.option("--name", required=True, help="Name of the new modality."),
        click.option(
            "--field",
            "field_name",
            required=True,
            metavar="CLASS",
            help="Its field: ScalarField or another, or your own as module:Class.",
        ),
        click.option("--config", default="{}", show_default=True, metavar="JSON", help="Settings of the field."),
        click.option(
            "--values",
            required=True,
            type=click.Path(exists=True, dir_okay=False),
            help="Parquet, JSON Lines or CSV with columns sample_id and value.",
        ),
        click.option("--partition", "-p", "keys", multiple=True, metavar="K", help="Of the dataset, these partitions."),
        click.option("--ignore-unknown", is_flag=True, help="Pass over ids that no sample has."),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), function)


def run_add_stream(
    datasets: Sequence[DatasetStore] | None,
    *,
    file: str | None,
    name: str,
    field_name: str,
    config: str,
    values: str,
    keys: Sequence[str],
    ignore_unknown: bool,
) -> None:
    """Adds the modality and says what was done.

    Args:
        datasets: the datasets that were named; None if none was.
        file: the file that was named.
        name: the new modality.
        field_name: its field's class.
        config: the field's settings, JSON.
        values: the table.
        keys: partitions of the dataset to add to; all by default.
        ignore_unknown: pass over ids that no sample has.

    Raises:
        ConfigError: the command was used wrongly.
        MmAssetsError: as `mm_assets.dataset.add_stream` and `mm_assets.pipeline.added_streams`.
    """
    from mm_assets.dataset.add_stream import read_values

    if (file is None) == (datasets is None):
        raise ConfigError("arguments", "FILE", "give either a file or --dataset")
    if datasets is not None and len(datasets) != 1:
        raise ConfigError("arguments", "--dataset", "is given more than once: ids are of one dataset")
    if keys and datasets is None:
        raise ConfigError("arguments", "--partition", "goes with --dataset")
    field = _field(field_name, config)
    table = read_values(values, field)
    if file is not None:
        _add_to_file(file, name, field, table, ignore_unknown=ignore_unknown)
    elif datasets:
        _add_to_dataset(datasets[0], name, field, table, keys=keys, ignore_unknown=ignore_unknown)


def _field(field_name: str, config: str) -> Field:
    from mm_assets.fields import field_from_declaration

    try:
        settings = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError("arguments", "--config", f"found {config[:60]!r}, expected JSON: {error}") from error
    return field_from_declaration(field_name, settings)


def _add_to_file(file: str, name: str, field: Field, values: Values, *, ignore_unknown: bool) -> None:
    from mm_assets.dataset.add_stream import add_values
    from mm_assets.storage.urls import is_local, local_path

    if not is_local(file):
        raise ConfigError("arguments", "FILE", f"found {file!r}, expected a local file: an object cannot grow in place")
    path = local_path(file)
    if _PACKED_NAME.fullmatch(path.name) and path.parent.name == "packed" and (path.parent.parent / "records").is_dir():
        dataset = path.parent.parent.name
        detail = f"{file} belongs to a dataset, whose manifests have its digest; use --dataset {dataset}"
        raise ConfigError("arguments", "FILE", detail)
    summary = add_values(path, name, field, values, ignore_unknown=ignore_unknown)
    count = f"{summary.num_present[name]:,} of {summary.num_samples:,} samples"
    click.echo(f"{file}: {name} added, {count}, {summary.num_bytes:,} bytes")


def _add_to_dataset(
    dataset: DatasetStore, name: str, field: Field, values: Values, *, keys: Sequence[str], ignore_unknown: bool
) -> None:
    from mm_assets.pipeline.added_streams import add_to_dataset
    from mm_assets.pipeline.publish import build_manifest

    for done in add_to_dataset(dataset, name, field, values, keys=keys, ignore_unknown=ignore_unknown):
        verb = "added" if done.added else "was there"
        count = f"{done.num_present:,} of {done.num_samples:,} samples"
        click.echo(f"{dataset.spec.name}/{done.partition}: {name} {verb}, {count}")
    report = build_manifest(dataset)
    say_missing_streams(dataset.spec.name, report.missing_streams)
    click.echo(f"{dataset.spec.name}: {report.url}")
    if any(stream["name"] == name for stream in report.manifest.get("added_streams", ())):
        click.echo(
            f'{name} is in the MSTR files: mm_assets.open(MANIFEST, format="mstr"), mm-assets inspect --format mstr'
        )


def say_missing_streams(dataset: str, missing: Mapping[str, tuple[str, ...]]) -> None:
    """Says on standard error which added streams the manifest does not list, and why.

    Args:
        dataset: its name.
        missing: stream to the partitions that lack it.
    """
    for name, keys in missing.items():
        shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
        line = f"stream {name!r} is not in the manifest: it is missing in {shown}"
        click.echo(f"{dataset}: {line}; add it with mm-assets add-stream", err=True)
