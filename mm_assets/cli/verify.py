"""`mm-assets verify`: every checksum and structure of packed files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.output import echo
from mm_assets.dataset.manifest import FILE_DIGITS, FORMATS
from mm_assets.errors import BadMagicError, FormatError, MmAssetsError, SourceError, UnsupportedVersionError
from mm_assets.summaries import counted

_SOUND, _DAMAGED = "ok", "DAMAGED"
_MAX_KEYS_IN_COMMAND = 20
# A file of a dataset, in a message.
_DATA_FILE = re.compile(rf"(?P<folder>[a-z_]+)/(?P<key>[A-Za-z0-9._%-]+)\.[0-9a-f]{{{FILE_DIGITS}}}\.[a-z]+")


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
    damaged = [each for each in (*found, *tables) if each["state"] == _DAMAGED]
    advice = _advice(damaged, options)
    for line in advice:
        echo(line, err=True)
    files_and_tables = ([{**each, "state": each["state"].lower()} for each in some] for some in (found, tables))
    write_document({**dict(zip(("files", "tables"), files_and_tables, strict=True)), "advice": advice})
    if any(each["state"] != _SOUND for each in (*found, *tables)):
        sys.exit(1)


def _advice(damaged: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[str]:
    """Returns the commands that repair what was reported as damaged."""
    messages: dict[str | None, list[str]] = {}
    for each in damaged:
        found = (fault if isinstance(fault, str) else fault["message"] for fault in each["damage"])
        messages.setdefault(_dataset_folder(each["file"], options), []).extend((each["file"], *found))
    return [line for folder, texts in messages.items() for line in _repairs(folder, texts)]


def _repairs(folder: str | None, messages: Sequence[str]) -> Iterator[str]:
    from mm_assets.pipeline.state.added_streams import STREAMS

    if folder is None:
        yield "to repair a file that is in no dataset's folder: copy it again, or write it again"
        return
    name = folder.rpartition("/")[2] or Path(folder).resolve().name
    repair, files = f"to repair the dataset {folder}", [f for text in messages for f in _DATA_FILE.finditer(text)]
    if keys := sorted({file["key"] for file in files if file["folder"] != STREAMS}):
        words = shlex.join([word for key in keys[:_MAX_KEYS_IN_COMMAND] for word in ("--partition", key)])
        rebuilt = "what is damaged" if len(keys) <= _MAX_KEYS_IN_COMMAND else f"the first of {len(keys):,} partitions"
        yield f"{repair}: `mm-assets run --dataset {name} {words}` rebuilds {rebuilt}"
    if any(file["folder"] == STREAMS for file in files):
        yield f"{repair}: `mm-assets add-stream --dataset {name}` with the stream's values writes its files again"
    if not files:
        yield f"{repair}: `mm-assets run --dataset {name}` writes the manifest again"


def _dataset_folder(file: str, options: Mapping[str, Any]) -> str | None:
    """Returns the dataset's folder that a file is in, or that it is."""
    from mm_assets.storage.store import Store
    from mm_assets.storage.urls import is_local, local_path

    if is_local(file):
        folders = [str(path) for path in (local_path(file), *local_path(file).parents[:2])]
    else:
        folders = [file.rstrip("/").rsplit("/", levels)[0] for levels in range(3)]
    for folder in folders:
        with suppress(MmAssetsError, OSError, ValueError):
            if Store(folder, options).exists("shards.json"):
                return folder
    return None


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

    try:
        with mm_assets.open(file, storage_options=options or None) as dataset:
            manifest = dataset.manifest
        if manifest is None:
            return None
        folder = manifest.name.rpartition("/")[0]
        folder = folder.rpartition("/")[0] if folder.rpartition("/")[2] == "manifests" else folder
    except (MmAssetsError, OSError):  # the report on the packed files says why
        return None
    from mm_assets.pipeline.state.manifests import verify_tables
    from mm_assets.storage.store import Store

    try:
        store = Store(folder or ".", options)
        content = store.read_bytes(manifest.name.removeprefix(folder).lstrip("/"))
        num_tables, faults = verify_tables(store, json.loads(content))
    except SourceError as error:
        echo(f"{file} (tables): cannot be read: {error}")
        return {"file": file, "state": "cannot be read", "num_tables": 0, "damage": [str(error)]}
    if not num_tables:
        return None
    state = _DAMAGED if faults else _SOUND
    echo(f"{file} (tables): {state}, {counted(num_tables, 'table')} checked, {counted(len(faults), 'fault')}")
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
        is_packed = isinstance(error, FormatError) and not isinstance(error, BadMagicError | UnsupportedVersionError)
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
