"""`mm-assets verify`: every checksum and structure of packed files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from mm_assets.cli.options import field_option
from mm_assets.cli.output import echo
from mm_assets.dataset.manifest import FORMATS
from mm_assets.errors import BadMagicError, FormatError, MmAssetsError
from mm_assets.summaries import counted

_SOUND, _DAMAGED = "ok", "DAMAGED"


@click.command()
@click.argument("files", nargs=-1, required=True)
@field_option
def command(files: tuple[str, ...]) -> None:
    """Check every checksum and structure; exit 1 and name the damaged samples.

    Of a manifest, or a folder, all files are checked in each format, with the digests of the manifest.
    """
    states = [(file, _verify(file, form)) for file in files for form in _formats_in(file)]
    for line in dict.fromkeys(_advice(file) for file, state in states if state == _DAMAGED):
        echo(line, err=True)
    if any(state != _SOUND for _, state in states):
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


def _formats_in(file: str) -> Sequence[str | None]:
    """The formats to check one after the other; None where the file itself is of one."""
    from mm_assets.storage.store import Store

    if file.endswith(tuple(f".{form}" for form in FORMATS)):
        return (None,)
    if file.endswith(".json"):
        return _formats_listed(file)
    try:
        names = Store(file).sizes("")
    except (MmAssetsError, OSError, ValueError):  # opening it says why
        return (None,)
    if "manifest.json" in names:
        return _formats_listed(file)
    return [form for form in FORMATS if any(name.endswith(f".{form}") for name in names)] or (None,)


def _formats_listed(file: str) -> Sequence[str]:
    """The formats of a manifest; all where it does not open, so that checking each says why."""
    import mm_assets

    with suppress(MmAssetsError, OSError), mm_assets.open(file) as dataset:
        if dataset.manifest is not None:
            return dataset.manifest.formats
    return FORMATS


def _verify(file: str, form: str | None) -> str:
    """Checks and reports the files of a format; the state that they are in."""
    import mm_assets

    shown = file if form is None else f"{file} ({form})"
    try:
        with mm_assets.open(file, format=form) as dataset:
            report = dataset.verify()
    except MmAssetsError as error:
        is_packed = isinstance(error, FormatError) and not isinstance(error, BadMagicError)
        state = _DAMAGED if is_packed else "cannot be checked"
        echo(f"{shown}: {state}: {str(error).removeprefix(f'{file}: ')}")
        return state
    except OSError as error:
        state = "cannot be read"
        echo(f"{shown}: {state}: {error.strerror or error}")
        return state
    state = _SOUND if report.ok else _DAMAGED
    checked = f"{counted(report.num_payloads, 'payload')} checked, {counted(len(report.damage), 'fault')}"
    echo(f"{shown}: {state}, {checked}")
    for damage in report.damage:
        place = f"sample {damage.sample} ({damage.sample_id})" if damage.sample is not None else "file"
        modality = f", {damage.modality}" if damage.modality else ""
        echo(f"  {place}{modality}: {damage.message}")
    return state
