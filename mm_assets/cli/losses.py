"""`mm-assets losses`: what a dataset lost, by reason and item by item."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, report_losses
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.losses import Loss, LossTotal


@click.command()
@dataset_options()
@click.option("--partition", "-p", "keys", multiple=True, metavar="K", help="These partitions; all by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with totals, losses and pending partitions.")
def command(chosen: DatasetChoice, keys: tuple[str, ...], as_json: bool) -> None:
    """List what was lost (failed partitions, rejects, dropped rows), and what is published in spite of a fault."""
    from mm_assets.pipeline.losses import loss_totals, losses, totals_said

    for dataset in chosen.stores():
        name, registered = dataset.spec.name, dataset.partitions()
        unknown = [key for key in keys if key not in registered]
        if unknown:
            detail = f"{unknown[0]!r} is not a registered partition of {name}"
            raise ConfigError("arguments", "--partition", detail)
        wanted = list(keys) or sorted(registered)
        totals = loss_totals(dataset, wanted)
        items = losses(dataset, wanted)
        failed = {key for key in wanted if dataset.failure(key) is not None}
        unpublished = [key for key in wanted if dataset.marker(key) is None and key not in failed]
        if as_json:
            _print_json(name, totals, items, unpublished)
            continue
        echo(f"{name}: {totals_said(totals)}, in {counted(len(wanted), 'partition')}")
        report_losses(name, totals)
        for loss in items:
            echo(_line(name, loss))
        for key in unpublished:
            echo(f"{name}/{key}: is not published: `mm-assets run` shows why", err=True)


def _line(dataset: str, loss: Loss) -> str:
    sample = "" if loss.sample_id is None else f" (sample {loss.sample_id})"
    times = "" if loss.count == 1 else f" ({loss.count:,} times)"
    what = f"{dataset}/{loss.partition}: {loss.kind}: {loss.stage}: {loss.reason}: {loss.place or 'no place'}{sample}"
    return f"{': '.join(filter(None, (what, loss.detail)))}{times}; {loss.advice}"


def _print_json(dataset: str, totals: Sequence[LossTotal], items: Iterable[Loss], unpublished: Sequence[str]) -> None:
    """Writes item by item: there may be very many."""
    shared = ("kind", "stage", "reason", "advice")
    listed = [
        {name: getattr(t.example, name) for name in shared} | {"count": t.count, "example": t.example.to_json()}
        for t in totals
    ]
    click.echo(f'{{"dataset": {json.dumps(dataset)}, "unpublished": {json.dumps(unpublished)},')
    click.echo(f' "totals": {json.dumps(listed)},\n "losses": [', nl=False)
    for number, loss in enumerate(items):
        click.echo(("," if number else "") + f"\n  {json.dumps(loss.to_json())}", nl=False)
    click.echo("]}")
