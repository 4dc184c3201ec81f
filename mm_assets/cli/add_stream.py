"""`mm-assets add-stream`: a modality from a table of values, into one MSTR file or all of a dataset's.

Nothing is written before the table has been read and its ids have been found. After an error, file and manifest are
as they were.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options, expect_settings_of_runs, partition_option
from mm_assets.cli.output import echo, look_command, report_missing_streams
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.dataset.add_stream import Values
    from mm_assets.fields import Field


@click.command("add-stream")
@click.argument("file", required=False)
@click.option("--name", required=True, help="Name of the new modality.")
@click.option("--field", "field_name", required=True, metavar="CLASS", help="Its field, such as ScalarField.")
@click.option("--config", default="{}", show_default=True, metavar="JSON", help="Settings of the field.")
@click.option(
    "--values",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Parquet, JSON Lines or CSV with columns sample_id and value.",
)
@partition_option("Of the dataset, these partitions.")
@click.option("--ignore-unknown", is_flag=True, help="Skip ids that no sample has.")
@dataset_options(single=True)
@json_option
def command(
    chosen: DatasetChoice,
    file: str | None,
    name: str,
    field_name: str,
    config: str,
    values: str,
    keys: Sequence[str],
    ignore_unknown: bool,
) -> None:
    """Add a modality to the MSTR file FILE in place, or to all published partitions of --dataset, and its manifest."""
    from mm_assets.dataset.add_stream import read_values
    from mm_assets.packing.plan import declared_imports
    from mm_assets.pipeline.state.added_streams import NewStream, add_to_dataset
    from mm_assets.pipeline.state.manifests import build_manifest

    if (file is None) == (not chosen.names):
        raise ConfigError("arguments", "FILE", "give either a file or --dataset")
    if len(chosen.names) > 1:
        raise ConfigError("arguments", "--dataset", "is given more than once: ids are of one dataset")
    if keys and file is not None:
        raise ConfigError("arguments", "--partition", "goes with --dataset")
    datasets = chosen.stores() if chosen.names else []
    for dataset in datasets:
        expect_settings_of_runs(dataset)
    field = _field(field_name, config)
    table = read_values(values, field)
    if file is not None:
        _add_to_file(file, name, field, table, ignore_unknown=ignore_unknown)
        return
    (dataset,) = datasets
    document, partitions = {}, []
    for done in add_to_dataset(dataset, name, field, table, keys=keys, ignore_unknown=ignore_unknown):
        partitions.append(done)
        document[done.partition] = {
            "added": done.added,
            "num_samples": done.num_samples,
            "num_present": done.num_present,
        }
        verb = "added" if done.added else "was there"
        count = f"{done.num_present:,} of {counted(done.num_samples, 'sample')}"
        echo(f"{dataset.spec.name}/{done.partition}: {name} {verb}, {count}")
    report = build_manifest(dataset, stream=NewStream(name=name, field=field, partitions=partitions))
    report_missing_streams(chosen, dataset.spec.name, report.missing_streams)
    echo(f"{dataset.spec.name}: {report.url}")
    declared = [stream["name"] for stream in report.manifest.get("added_streams", ())]
    streams = [one for one in declared if one not in report.missing_streams]
    if name in streams:
        own = declared_imports({"fields": [{"field": field_name}]}) | declared_imports(dataset.spec.pack)
        inspect = look_command("inspect", report.url, own)
        echo(f"{name} is in the dataset: {inspect}, or mm_assets.open({report.url!r}) in Python")
    found = {"stream": name, "partitions": document, "manifest": report.url, "streams_in_manifest": streams}
    write_document({"datasets": {dataset.spec.name: found}})


def _field(field_name: str, config: str) -> Field:
    from mm_assets.cli.project import make_importable
    from mm_assets.fields import field_from_declaration

    make_importable(Path.cwd())
    try:
        settings = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError("arguments", "--config", f"found {config[:60]!r}, expected JSON: {error}") from error
    return field_from_declaration(field_name, settings)


def _add_to_file(file: str, name: str, field: Field, values: Values, *, ignore_unknown: bool) -> None:
    from mm_assets.dataset.add_stream import add_values
    from mm_assets.dataset.manifest import PACKED_NAME
    from mm_assets.pipeline.chain import PACKED_FOLDER
    from mm_assets.storage.urls import is_local, local_path

    if not is_local(file):
        raise ConfigError("arguments", "FILE", f"found {file!r}, expected a local file: an object cannot grow in place")
    path = local_path(file)
    folder = path.parent.parent
    if PACKED_NAME.fullmatch(path.name) and path.parent.name == PACKED_FOLDER and (folder / "records").is_dir():
        where = shlex.join(["--root", str(folder.parent), "--dataset", folder.name])
        detail = f"{file} belongs to a dataset, whose manifests have its digest; use {where}"
        raise ConfigError("arguments", "FILE", detail)
    summary = add_values(path, name, field, values, ignore_unknown=ignore_unknown)
    count = f"{summary.num_present[name]:,} of {counted(summary.num_samples, 'sample')}"
    echo(f"{file}: {name} added, {count}, {summary.num_bytes:,} bytes")
    numbers = {"num_samples": summary.num_samples, "num_present": summary.num_present[name]}
    write_document({"file": file, "stream": name, **numbers, "num_bytes": summary.num_bytes})
