"""`mm-assets losses`: what a dataset lost, by reason and item by item."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, named_in_part, report_losses
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.losses import Loss, LossTotal


@click.command()
@dataset_options()
@click.option("--partition", "-p", "keys", multiple=True, metavar="K", help="These partitions; all by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with totals, losses and unpublished partitions.")
def command(chosen: DatasetChoice, keys: tuple[str, ...], as_json: bool) -> None:
    """List what was lost (failed partitions, rejects, dropped rows), and what is published in spite of a fault."""
    from mm_assets.pipeline.losses import FAILED, loss_totals, losses
    from mm_assets.pipeline.publish import partitions_in_manifest

    for dataset in chosen.stores():
        name, registered = dataset.spec.name, dataset.partitions()
        unknown = [key for key in keys if key not in registered]
        if unknown:
            detail = f"{unknown[0]!r} is not a registered partition of {name}"
            raise ConfigError("arguments", "--partition", detail)
        wanted = list(keys) or sorted(registered)
        totals = loss_totals(dataset, wanted)
        items = losses(dataset, wanted)
        listed = partitions_in_manifest(dataset)
        unpublished = [key for key in wanted if key not in listed]
        if as_json:
            _print_json(name, totals, items, unpublished)
            continue
        report_losses(chosen, name, totals)
        for loss in items:
            echo(chosen.complete(_line(name, loss)))
            if loss.reason == FAILED:
                unpublished = [key for key in unpublished if key != loss.partition]
        if unpublished:
            shown = named_in_part(unpublished)
            source = dataset.registered().source or ""
            is_declared = source == dataset.spec.shards  # of others the root stands for the shards
            shards = "" if is_declared else f" --shards {shlex.quote(source)}"
            run = chosen.complete(f"`mm-assets run --dataset {name}{shards}`")
            number = counted(len(unpublished), "partition")
            echo(f"{name}: {number} not in the manifest ({shown}): {run} publishes them, or says why not", err=True)


def _line(dataset: str, loss: Loss) -> str:
    sample = "" if loss.sample_id is None else f"(sample {loss.sample_id})"
    place = " ".join(filter(None, (loss.place, sample)))
    parts = (f"{dataset}/{loss.partition}", loss.kind, loss.stage, loss.reason, place, loss.detail)
    times = "" if loss.count == 1 else f" ({loss.count:,} times)"
    return f"{': '.join(filter(None, parts))}{times}; {loss.advice}"


def _print_json(dataset: str, totals: Sequence[LossTotal], items: Iterable[Loss], unpublished: Sequence[str]) -> None:
    """Writes item by item: there may be very many; then the partitions that neither are published nor failed."""
    from mm_assets.pipeline.losses import FAILED

    shared = ("kind", "stage", "reason", "advice")
    listed = [
        {name: getattr(t.example, name) for name in shared} | {"count": t.count, "example": t.example.to_json()}
        for t in totals
    ]
    failed: set[str] = set()
    click.echo(f'{{"dataset": {json.dumps(dataset)},')
    click.echo(f' "totals": {json.dumps(listed)},\n "losses": [', nl=False)
    for number, loss in enumerate(items):
        click.echo(("," if number else "") + f"\n  {json.dumps(loss.to_json())}", nl=False)
        failed.update([loss.partition] if loss.reason == FAILED else [])
    click.echo(f'],\n "unpublished": {json.dumps([key for key in unpublished if key not in failed])}}}')
