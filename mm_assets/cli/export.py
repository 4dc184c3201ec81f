"""`mm-assets export`: writes packed samples in another project's format."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option
from mm_assets.cli.output import echo, size_text
from mm_assets.cli.progress import LINE_SECONDS, duration_text
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.exports.export import ExportProgress


@click.command()
@click.argument("format_name", metavar="FORMAT")
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option("--shard-bytes", type=int, metavar="N", help="Maximum bytes of content in a shard; 256 MiB by default.")
@click.option("--shard-samples", type=int, metavar="N", help="Samples in a shard; replaces --shard-bytes.")
@click.option("--modality", "modalities", multiple=True, metavar="NAME", help="Export only this modality; repeatable.")
@click.option("--where", metavar="SQL", help="Export only samples that match, as in `Dataset.filter`.")
@click.option("--image-format", type=click.Choice(["jpeg", "png"]), help="Encode images again; copied by default.")
@click.option("--quality", type=click.IntRange(1, 100), default=95, show_default=True, help="JPEG quality.")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes; one per core by default.")
@field_option
@json_option
def command(
    format_name: str,
    source: str,
    out: str,
    shard_bytes: int | None,
    shard_samples: int | None,
    modalities: Sequence[str],
    where: str | None,
    image_format: str | None,
    quality: int,
    workers: int | None,
) -> None:
    """Write the packed samples of SOURCE, a manifest, folder or packed file, to the folder or URL OUT as FORMAT.

    FORMAT is webdataset, hf, lance, mds, litdata, energon, lerobot or parquet (docs/exports.md). Payloads are copied.
    The same command continues an interrupted export. At the end every shard is read back and compared with the
    samples.
    """
    from mm_assets.dataset.dataset import open as open_dataset
    from mm_assets.exports.export import SHARD_BYTES, export
    from mm_assets.pipeline.load.processes import num_processors

    with open_dataset(source, verify=True) as dataset:
        view = dataset if where is None else dataset.filter(where)
        if modalities:
            view = view.select_modalities(modalities)
        summary = export(
            view,
            format_name,
            out,
            shard_bytes=SHARD_BYTES if shard_bytes is None else shard_bytes,
            shard_samples=shard_samples,
            image_format=image_format,
            quality=quality,
            workers=workers or num_processors(),
            progress=_Lines(),
        )
    shards, samples = counted(len(summary.shards), "shard"), counted(summary.num_samples, "sample")
    size = size_text(summary.num_bytes)
    echo(f"{summary.url}: {samples} in {shards} of {format_name}, {size}, read back and compared")
    if summary.num_repeated:
        echo(
            f"warning: {counted(summary.num_repeated, 'sample')} had the id of another sample and got another key",
            err=True,
        )
    write_document(
        {
            "format": format_name,
            "url": summary.url,
            "num_samples": summary.num_samples,
            "num_shards": len(summary.shards),
            "num_reused": summary.num_reused,
            "num_bytes": summary.num_bytes,
            "num_repeated_ids": summary.num_repeated,
        }
    )


@dataclass
class _Lines:
    """Prints the progress of an export every few seconds: samples, bytes per second, remaining time."""

    began: float = field(default_factory=time.monotonic)
    printed: float = field(default_factory=time.monotonic)
    first: ExportProgress | None = None  # the first report of the phase; includes shards of an interrupted export

    def __call__(self, now: ExportProgress) -> None:
        clock = time.monotonic()
        if self.first is None or self.first.is_check != now.is_check:
            self.first, self.began = now, clock
        if clock - self.printed < LINE_SECONDS and not sys.stderr.isatty():
            return
        self.printed = clock
        seconds = max(clock - self.began, 1e-6)
        verb = "checked" if now.is_check else "written"
        parts = [f"{now.num_samples:,}/{now.total_samples:,} samples {verb}"]
        num_new = now.num_samples - self.first.num_samples
        if num_new:
            rate = (now.num_bytes - self.first.num_bytes) / seconds
            parts.append(f"{size_text(round(rate))}/s")
            parts.append(f"{duration_text((now.total_samples - now.num_samples) * seconds / num_new)} left")
        line = ", ".join(parts)
        click.echo(f"\r{line:<70}" if sys.stderr.isatty() else line, err=True, nl=not sys.stderr.isatty())
        if sys.stderr.isatty() and now.num_shards == now.total_shards:
            click.echo(err=True)
