"""`mm-assets status`: what is published, pending and running, what failed last, sizes, versions, and the manifest."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import (
    echo,
    named_in_part,
    report_error,
    report_faults,
    report_missing_streams,
    report_skipped,
    size_text,
)
from mm_assets.errors import MmAssetsError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.explore.status import DatasetStatus, Running, ShardChanges

_SHOWN = 10  # failures
_STORED = {"shards": "in shards", "packed": "packed", "tables": "in tables"}


@click.command()
@dataset_options(undeclared=True)
@json_option
def command(chosen: DatasetChoice) -> None:
    """Show what is published, what is pending and why, what is running, what failed last, and what the manifest lists.

    Nothing is registered or written. Exit code 0 also where something is pending or failed; 1 where a part of the
    state cannot be read.
    """
    from mm_assets.pipeline.explore.status import DatasetStatus, dataset_status
    from mm_assets.pipeline.state.folder import DatasetStore

    found: dict[str, Any] = {}
    code = 0
    for spec in chosen.specs(read_only=True):
        try:
            status = dataset_status(DatasetStore(spec))
        except MmAssetsError as error:  # one dataset's trouble is not the others'
            code = report_error(error, chosen)
            found[spec.name] = dict.fromkeys(("published", *_names(DatasetStatus))) | {"unknown": [str(error)]}
            continue
        found[spec.name] = _as_json(status)
        if not wants_json():
            _print(chosen, status)
        for line in status.unknown:
            echo(f"error: {spec.name}: {chosen.complete(line)}", err=True)
            code = 1
    write_document({"datasets": found})
    if code:
        sys.exit(code)


def _print(chosen: DatasetChoice, status: DatasetStatus) -> None:
    name, pending = status.dataset, len(status.pending)
    number = counted(len(status.registered), "partition")
    said = f"{number}: {status.num_published:,} published, {pending:,} pending" if status.registered else "no partition"
    said += f", {len(status.running):,} running" if status.running else ""
    echo(f"{name}: {said}" + (f", {len(status.failures):,} failed" if status.failures else ""))
    if status.is_list_lost:
        lists_again = chosen.complete(f"`mm-assets register --dataset {name}`")
        echo(f"{name}: shards.json is missing, though partitions were published: {lists_again} lists the shards again")
    for host, keys in _by_host(status.running).items():
        echo(f"{name}: running on {host}: {named_in_part(keys)}")
    if any(status.num_bytes.values()):
        sizes = ", ".join(f"{size_text(size)} {_STORED[what]}" for what, size in status.num_bytes.items())
        # Samples are counted by the manifest.
        samples = "" if status.manifest is None and status.versions else f"{counted(status.num_samples, 'sample')}, "
        echo(f"{name}: {samples}{sizes}, {counted(len(status.versions), 'version')}")
    if status.shards is not None:
        _print_shards(name, status.shards)
        report_skipped(name, status.shards.skipped)
    if status.pending:
        report_faults(status.pending)
    for asset, missing in status.exports.items():
        number = f"pending for {counted(len(missing), 'partition')} ({named_in_part(missing)})"
        echo(f"{name}: {asset}: {number if missing else 'complete'}")
    for key, failure in islice(status.failures.items(), _SHOWN):
        echo(f"{name}/{key}: failed at {failure.stage}: {chosen.complete(failure.said)}")
    if len(status.failures) > _SHOWN:
        echo(f"{name}: and {len(status.failures) - _SHOWN:,} more failed: --json has all")
    _print_manifest(status)
    report_missing_streams(chosen, name, status.missing_streams)
    if status.refused is not None:
        echo(f"{name}: a run is refused: {chosen.complete(str(status.refused))}")
    elif effect := _effect_of_run(status):
        run = f"`mm-assets run --dataset {name}`"
        # Options that declare a dataset may be many, and they were just typed.
        command = chosen.complete(run) if chosen.shards is None else "`mm-assets run` with the same arguments"
        echo(f"{name}: {command} {effect}")


def _effect_of_run(status: DatasetStatus) -> str:
    """Returns what a load would do; empty if nothing."""
    are_shards_new = status.shards is not None and bool(status.shards.new or status.shards.changed)
    if status.pending or any(status.exports.values()) or are_shards_new:
        return "runs what is pending"
    is_behind = status.manifest is not None and (status.manifest.left_out or status.manifest.outdated)
    return "makes the next manifest" if is_behind else ""


def _by_host(running: Mapping[str, Running]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, claim in running.items():
        found.setdefault(claim.host, []).append(key)
    return found


def _print_shards(dataset: str, shards: ShardChanges) -> None:
    changes = (
        ("new", shards.new),
        ("changed", shards.changed),
        ("touched, to be compared by their bytes", shards.touched),
        ("gone", shards.gone),
        ("still changing or too young", shards.unsettled),
    )
    for what, keys in changes:
        if keys:
            echo(f"{dataset}: shards since the registration: {len(keys):,} {what} ({named_in_part(keys)})")


def _print_manifest(status: DatasetStatus) -> None:
    dataset, manifest = status.dataset, status.manifest
    if manifest is None:
        echo(f"{dataset}: " + ("the manifest cannot be read" if status.versions else "no manifest"))
        return
    if manifest.is_damaged:
        echo(f"{dataset}: the manifest is damaged: {manifest.url}")
        echo(f"{dataset}: its newest copy is of {counted(manifest.num_partitions, 'partition')}")
        return
    version = f", version {manifest.digest[:8]}" if manifest.digest else ", as its copy in manifests/ lists them"
    echo(f"{dataset}: manifest of {counted(manifest.num_partitions, 'partition')}{version}: {manifest.url}")
    for what, reasons in (("not in it", manifest.left_out), ("in it and outdated", manifest.outdated)):
        by_reason: dict[str, list[str]] = {}
        for key, reason in reasons.items():  # what is pending was listed with its reason
            by_reason.setdefault("pending" if key in status.pending else reason, []).append(key)
        for reason, keys in by_reason.items():
            echo(f"{dataset}: {what}: {counted(len(keys), 'partition')}, {reason} ({named_in_part(keys)})")


def _as_json(status: DatasetStatus) -> Mapping[str, Any]:
    from mm_assets.pipeline.state.staleness import by_reason

    pending = [
        {"first": first.name, "reason": reason, "partitions": _said(keys, status)}
        for (first, reason), keys in by_reason(status.pending).items()
    ]
    return {name: getattr(status, name) for name in _names(type(status))} | {
        "registered": len(status.registered),
        "published": status.num_published,
        "pending": pending,
        "running": {key: asdict(claim) for key, claim in status.running.items()},
        "failures": {key: {**asdict(failure), "said": failure.said} for key, failure in status.failures.items()},
        "shards": None if status.shards is None else asdict(status.shards),
        "manifest": None if status.manifest is None else asdict(status.manifest),
        "refused": None if status.refused is None else str(status.refused),
    }


def _names(of: type[DatasetStatus]) -> list[str]:
    return [column.name for column in fields(of) if column.name != "dataset"]


def _said(keys: Sequence[str], status: DatasetStatus) -> Mapping[str, str]:
    """Each partition with what is special about its reason; empty where nothing is."""
    return {key: status.pending[key].detail for key in keys}
