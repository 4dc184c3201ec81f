"""`mm-assets verify`: every checksum and structure of packed files."""

from __future__ import annotations

import sys

import click

from mm_assets.cli.output import echo
from mm_assets.errors import FormatError, MmAssetsError
from mm_assets.summaries import counted


@click.command()
@click.argument("files", nargs=-1, required=True)
def command(files: tuple[str, ...]) -> None:
    """Check every checksum and structure; exit 1 and name the damaged samples."""
    import mm_assets

    bad = False
    for file in files:
        try:
            with mm_assets.open(file) as dataset:
                report = dataset.verify()
        except MmAssetsError as error:
            bad = True
            state = "DAMAGED" if isinstance(error, FormatError) else "cannot be checked"
            echo(f"{file}: {state}: {error}")
            continue
        except OSError as error:
            bad = True
            echo(f"{file}: cannot be read: {error.strerror or error}")
            continue
        bad = bad or not report.ok
        state = "ok" if report.ok else "DAMAGED"
        checked = f"{counted(report.num_payloads, 'payload')} checked, {counted(len(report.damage), 'fault')}"
        echo(f"{file}: {state}, {checked}")
        for damage in report.damage:
            place = f"sample {damage.sample} ({damage.sample_id})" if damage.sample is not None else "file"
            modality = f", {damage.modality}" if damage.modality else ""
            echo(f"  {place}{modality}: {damage.message}")
    if bad:
        sys.exit(1)
