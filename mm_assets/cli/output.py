"""Output that commands share: errors in one line, waiting, streams that a manifest lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from mm_assets.errors import ConfigError, MmAssetsError

if TYPE_CHECKING:
    from mm_assets.cli.options import DatasetChoice
    from mm_assets.pipeline.register import Registration
    from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["report_error", "report_missing_streams", "report_registration", "wait_for_shards"]

_SHOWN = 5  # partitions named in one line


def report_error(error: MmAssetsError | OSError, chosen: DatasetChoice | None) -> int:
    """Writes an error in one line to standard error and returns the exit code.

    Raises:
        OSError: it concerns no path, so its traceback is needed.
    """
    if isinstance(error, OSError) and not isinstance(error, MmAssetsError):
        if error.filename is None:
            raise error
        click.echo(f"error: {error.filename}: {error.strerror}", err=True)
        return 1
    click.echo(f"error: {chosen.complete(str(error)) if chosen else error}", err=True)
    return 2 if isinstance(error, ConfigError) else 1


def wait_for_shards(spec: DatasetSpec) -> Callable[[float], None]:
    """A function that waits until young shards have settled, and says so."""

    def wait(seconds: float) -> None:
        click.echo(f"{spec.name}: waiting {seconds:g} s for young shards to settle (settle_seconds)", err=True)
        time.sleep(seconds)

    return wait


def report_registration(dataset: str, found: Registration) -> None:
    """Writes to standard error the partitions whose shards are gone, and the shards that are too young."""
    for key in found.removed:
        click.echo(f"{dataset}/{key}: its shards are gone; it leaves the next manifest", err=True)
    for url in found.unsettled:
        click.echo(f"{dataset}: not taken, still changing or too young: {url}", err=True)


def report_missing_streams(chosen: DatasetChoice, dataset: str, missing: Mapping[str, tuple[str, ...]]) -> None:
    """Writes to standard error which added streams the manifest lacks, why, and the command that adds them."""
    for name, keys in missing.items():
        shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
        advice = chosen.complete(f"`mm-assets add-stream --dataset {dataset} --name {name}`")
        line = f"stream {name!r} is not in the manifest: it is missing in {shown}"
        click.echo(f"{dataset}: {line}; add it with {advice} and its --field and --values", err=True)
