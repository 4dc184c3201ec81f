"""`mm-assets inspect`: what a packed file or a manifest holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option, parsed_options, parsed_settings, storage_option
from mm_assets.cli.output import echo
from mm_assets.dataset.manifest import FORMATS
from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.summaries import counted, summarize

if TYPE_CHECKING:
    from mm_assets.dataset.dataset import Dataset
    from mm_assets.fields import Field


@click.command()
@click.argument("file")
@click.option("--sample", "-s", type=int, metavar="N", help="Also show sample N, counted from 0.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), help="Which files of a manifest; MULT by default, if it has them."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="MODALITY.KEY=VALUE",
    help="Decode a modality with this setting of its field, such as image.decode_size=[64,64].",
)
@field_option
@storage_option
@json_option
def command(
    file: str, sample: int | None, form: str | None, settings: tuple[str, ...], storage_options: tuple[str, ...]
) -> None:
    """Show what a packed file or manifest holds."""
    import mm_assets

    with mm_assets.open(file, format=form, storage_options=parsed_options(storage_options) or None) as opened:
        dataset = opened.with_settings(_by_modality(settings)) if settings else opened
        modalities: dict[str, Any] = {}
        document: dict[str, Any] = {
            "file": file,
            "num_samples": len(dataset),
            "schema": dict(dataset.schema),
            "modalities": modalities,
            "sample": None,
        }
        echo(f"{file}: {counted(len(dataset), 'sample')}")
        pack = dataset.schema.get("pack")
        if pack and pack.get("preset"):
            echo(f"preset: {pack['preset']}")
        for key, value in dataset.schema.items():
            if key.endswith("_columns"):
                columns = ", ".join(f"{column['name']} {column['type']}" for column in value)
                echo(f"{key.replace('_', ' ')}: {columns or 'none'}")
            elif key not in ("modalities", "pack", "version"):
                echo(f"{key}: {json.dumps(value, ensure_ascii=False)}")
        for name in dataset.names:
            field = dataset.fields.get(name)
            shown, present = (
                _refusal(dataset, name) if field is None else _settings(field),
                dataset.presence(name).sum(),
            )
            echo(f"  {name}: {shown}, {int(present):,} present")
            modalities[name] = {
                "field": None if field is None else type(field).__name__,
                "shown": shown,
                "present": int(present),
            }
        if sample is not None:
            if not -len(dataset) <= sample < len(dataset):
                raise ConfigError(
                    "arguments", "--sample", f"is {sample}, the file has {counted(len(dataset), 'sample')}"
                )
            values = {name: _shown(dataset, sample, name) for name in dataset.names}
            document["sample"] = {"index": sample, "sample_id": dataset.sample_ids[sample], "values": values}
            echo(f"sample {sample}: {dataset.sample_ids[sample]}")
            for name, value in values.items():
                echo(f"  {name}: {value}")
    write_document(document)


def _by_modality(settings: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    found = parsed_settings(settings)
    wrong = next((name for name, value in found.items() if not isinstance(value, dict)), None)
    if wrong is not None:
        raise ConfigError("arguments", "--set", f"found {wrong!r}, expected MODALITY.KEY=VALUE")
    return found


def _refusal(dataset: Dataset, name: str) -> str:
    """Why a modality cannot be decoded here."""
    try:
        dataset.read_modality(name, [])
    except MmAssetsError as error:
        return f"NOT DECODED: {error}"
    return "NOT DECODED"


def _shown(dataset: Dataset, sample: int, name: str) -> str:
    """One value in a line; one that cannot be decoded does not hide the others."""
    try:
        value = dataset.read_sample(sample, [name])[name]
    except MmAssetsError as error:
        return f"NOT DECODED: {error}"
    return "absent" if value is None else summarize(value)


def _settings(field: Field) -> str:
    """A field with the settings that are not its defaults."""
    from mm_assets.fields import Field

    changed = []
    for one in dataclasses.fields(field):
        value = getattr(field, one.name)
        if one.default is dataclasses.MISSING or value != one.default:
            changed.append(f"{one.name}={_settings(value) if isinstance(value, Field) else repr(value)}")
    return f"{type(field).__name__}({', '.join(changed)})"
