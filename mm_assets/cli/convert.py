"""`mm-assets convert`: MULT into MSTR, or back."""

from __future__ import annotations

from pathlib import Path

import click

from mm_assets.errors import ConfigError


@click.command()
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
def command(source: str, target: str) -> None:
    """Turn MULT into MSTR or back, by OUT's extension; payloads are copied, never decoded."""
    from mm_assets.formats import convert as convert_file

    if Path(target).suffix not in (".mult", ".mstr"):
        raise ConfigError("arguments", "OUT", f"ends in {Path(target).suffix!r}, allowed: .mult, .mstr")
    summary = convert_file(source, target)
    click.echo(f"{target}: {summary.num_samples:,} samples, {summary.num_bytes:,} bytes")
