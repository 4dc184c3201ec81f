"""`mm-assets verify`: every checksum and structure of packed files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.output import echo
from mm_assets.dataset.manifest import FORMATS
from mm_assets.errors import BadMagicError, FormatError, MmAssetsError, SourceError
from mm_assets.summaries import counted

_SOUND, _DAMAGED = "ok", "DAMAGED"


@click.command()
@click.argument("files", nargs=-1, required=True)
@field_option
@storage_option
@json_option
def command(files: tuple[str, ...], storage_options: tuple[str, ...]) -> None:
    """Check every checksum and structure; exit 1 and name the damaged samples.

    Of a manifest, or a folder, all files are checked in each format, with the digests of the manifest, and so are the
    tables that they were made from, where they are still there.
    """
    options = parsed_options(storage_options)
    found = [_verify(file, form, options) for file in files for form in _formats_in(file, options)]
    tables = [each for each in (_verify_tables(file, options) for file in files) if each is not None]
    bad = [each["file"] for each in (*found, *tables) if each["state"] == _DAMAGED]
    advice = list(dict.fromkeys(map(_advice, bad)))
    for line in advice:
        echo(line, err=True)
    files_and_tables = ([{**each, "state": each["state"].lower()} for each in some] for some in (found, tables))
    write_document({**dict(zip(("files", "tables"), files_and_tables, strict=True)), "advice": advice})
    if any(each["state"] != _SOUND for each in (*found, *tables)):
        sys.exit(1)


def _advice(file: str) -> str:
    """How to make a damaged file again."""
    from mm_assets.storage.urls import is_local, local_path

    if is_local(file):
        path = local_path(file)
        for folder in (path, *path.parents[:2]):
            if (folder / "shards.json").is_file():
                command = f"`mm-assets run --dataset {folder.name}`"
                return f"to repair the dataset {folder}: delete its damaged files; {command} packs them again"
    return "to repair a file that is in no dataset's folder: copy it again, or make it again"


def _formats_in(file: str, options: Mapping[str, Any]) -> Sequence[str | None]:
    """The formats to check one after the other; None where the file itself is of one."""
    from mm_assets.storage.store import Store

    if file.endswith(tuple(f".{form}" for form in FORMATS)):
        return (None,)
    if file.endswith(".json"):
        return _formats_listed(file, options)
    try:
        names = Store(file, options).sizes("")
    except (MmAssetsError, OSError, ValueError):  # opening it says why
        return (None,)
    if "manifest.json" in names:
        return _formats_listed(file, options)
    return [form for form in FORMATS if any(name.endswith(f".{form}") for name in names)] or (None,)


def _formats_listed(file: str, options: Mapping[str, Any]) -> Sequence[str]:
    """The formats of a manifest; all where it does not open, so that checking each says why."""
    import mm_assets

    with suppress(MmAssetsError, OSError), mm_assets.open(file, storage_options=options or None) as dataset:
        if dataset.manifest is not None:
            return dataset.manifest.formats
    return FORMATS


def _verify_tables(file: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Checks and reports the tables of a manifest's partitions; None where there are none, or no manifest."""
    import mm_assets
    from mm_assets.pipeline.state.markers import verify_tables
    from mm_assets.storage.store import Store

    try:
        with mm_assets.open(file, storage_options=options or None) as dataset:
            manifest = dataset.manifest
        if manifest is None:
            return None
        folder = manifest.name.rpartition("/")[0]
        folder = folder.rpartition("/")[0] if folder.rpartition("/")[2] == "manifests" else folder
    except (MmAssetsError, OSError):  # the report on the packed files says why
        return None
    try:
        packed = {made.sha256 for made in manifest.files if made.sha256}
        num_tables, faults = verify_tables(Store(folder or ".", options), packed)
    except SourceError as error:
        echo(f"{file}: tables: cannot be read: {error}")
        return {"file": file, "state": "cannot be read", "num_tables": 0, "damage": [str(error)]}
    if not num_tables:
        return None
    state = _DAMAGED if faults else _SOUND
    damaged = f"tables: {_DAMAGED}, " if faults else ""
    echo(f"{file}: {damaged}{num_tables:,} tables and records checked, {counted(len(faults), 'fault')}")
    for fault in faults:
        echo(f"  {fault}")
    return {"file": file, "state": state, "num_tables": num_tables, "damage": faults}


def _verify(file: str, form: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks and reports the files of a format: the state that they are in, and what was found."""
    import mm_assets

    shown = file if form is None else f"{file} ({form})"
    found: dict[str, Any] = {
        "file": file,
        "format": form,
        "state": "",
        "message": None,
        "num_payloads": None,
        "damage": [],
    }
    try:
        with mm_assets.open(file, format=form, storage_options=options or None) as dataset:
            report = dataset.verify()
    except MmAssetsError as error:
        is_packed = isinstance(error, FormatError) and not isinstance(error, BadMagicError)
        state = _DAMAGED if is_packed else "cannot be checked"
        message = str(error).removeprefix(f"{file}: ")
        echo(f"{shown}: {state}: {message}")
        return found | {"state": state, "message": message}
    except OSError as error:
        state = "cannot be read"
        message = error.strerror or str(error)
        echo(f"{shown}: {state}: {message}")
        return found | {"state": state, "message": message}
    state = _SOUND if report.ok else _DAMAGED
    checked = f"{counted(report.num_payloads, 'payload')} checked, {counted(len(report.damage), 'fault')}"
    echo(f"{shown}: {state}, {checked}")
    for damage in report.damage:
        place = f"sample {damage.sample} ({damage.sample_id})" if damage.sample is not None else "file"
        modality = f", {damage.modality}" if damage.modality else ""
        echo(f"  {place}{modality}: {damage.message}")
    listed = [
        {"sample": d.sample, "sample_id": d.sample_id, "modality": d.modality, "message": d.message}
        for d in report.damage
    ]
    return found | {"state": state, "num_payloads": report.num_payloads, "damage": listed}
