"""`mm-assets convert`: packed files between MULT and MSTR."""

from __future__ import annotations

from pathlib import Path

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option
from mm_assets.cli.output import echo
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted


@click.command()
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@field_option
@json_option
def command(source: str, target: str) -> None:
    """Convert packed files between MULT and MSTR, by OUT's extension; payloads are copied, never decoded."""
    from mm_assets.formats.convert import WRITERS
    from mm_assets.formats.convert import convert as convert_file

    if Path(target).suffix not in WRITERS:
        raise ConfigError("arguments", "OUT", f"ends in {Path(target).suffix!r}, allowed: {', '.join(WRITERS)}")
    summary = convert_file(source, target)
    echo(f"{target}: {counted(summary.num_samples, 'sample')}, {summary.num_bytes:,} bytes")
    write_document({"file": target, "num_samples": summary.num_samples, "num_bytes": summary.num_bytes})
