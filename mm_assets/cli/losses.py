"""`mm-assets losses`: what a dataset lost, by reason and item by item."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.options import (
    DatasetChoice,
    dataset_options,
    expect_settings_of_runs,
    partition_option,
    published_state,
)
from mm_assets.cli.output import echo, named_in_part, report_losses
from mm_assets.errors import ConfigError, meant
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.state.losses import Loss, LossTotal


@click.command()
@dataset_options()
@partition_option("These partitions; all by default.")
@json_option
def command(chosen: DatasetChoice, keys: tuple[str, ...]) -> None:
    """List what was lost (failed partitions, rejects, dropped rows), and what is published in spite of a fault."""
    from mm_assets.pipeline.state.losses import FAILED, loss_totals, losses

    document = {}
    for dataset in chosen.stores():
        name, state = dataset.spec.name, published_state(chosen, dataset)
        unknown = [key for key in keys if key not in state.partitions]
        if unknown:
            detail = f"{unknown[0]!r} is not a registered partition of {name}{meant(unknown[0], state.partitions)}"
            raise ConfigError("arguments", "--partition", detail)
        if chosen.settings:
            try:
                expect_settings_of_runs(dataset)
            except ConfigError as error:
                if any(map(state.is_published, state.partitions)):  # else each partition's newest record counts
                    echo(f"warning: {error.detail}", err=True)
        partitions = list(keys) or sorted(state.partitions)
        totals = loss_totals(state, partitions)
        items = losses(state, partitions)
        unpublished = [key for key in partitions if key not in state.listed]
        if wants_json():
            document[name] = _as_json(totals, items, unpublished)
            continue
        report_losses(chosen, name, totals)
        advice = {(t.example.stage, t.example.reason): t.example.advice for t in totals}  # which is printed above
        for loss in items:
            own = "" if loss.advice == advice.get((loss.stage, loss.reason)) else f"; {loss.advice}"
            echo(chosen.complete(f"{_line(name, loss)}{own}"))
            if loss.reason == FAILED:
                unpublished = [key for key in unpublished if key != loss.partition]
        if unpublished:
            shown = named_in_part(unpublished)
            source = dataset.registered().source or ""
            is_declared = dataset.spec.is_made_from(source)  # of others the root stands for the shards
            shards = "" if is_declared else f" --shards {shlex.quote(source)}"
            run = chosen.complete(f"`mm-assets run --dataset {name}{shards}`")
            number = counted(len(unpublished), "partition")
            echo(f"{name}: {number} not in the manifest ({shown}): {run} publishes them, or says why not", err=True)
    write_document({"datasets": document})


def _line(dataset: str, loss: Loss) -> str:
    sample = "" if loss.sample_id is None else f"(sample {loss.sample_id})"
    place = " ".join(filter(None, (loss.place, sample)))
    parts = (f"{dataset}/{loss.partition}", loss.kind, loss.stage, loss.reason, place, loss.detail)
    times = "" if loss.count == 1 else f" ({loss.count:,} times)"
    return f"{': '.join(filter(None, parts))}{times}"


def totals_document(totals: Sequence[LossTotal]) -> list[Mapping[str, Any]]:
    """Totals by reason as documents have them."""
    shared = ("kind", "stage", "reason", "advice")
    return [
        {name: getattr(t.example, name) for name in shared} | {"count": t.count, "example": t.example.to_json()}
        for t in totals
    ]


def _as_json(totals: Sequence[LossTotal], items: Iterator[Loss], unpublished: Sequence[str]) -> Mapping[str, Any]:
    """A dataset's part of the document; the items, of which there may be very many, are read when it is written."""
    from mm_assets.pipeline.state.losses import FAILED

    failed: set[str] = set()

    def noted() -> Iterator[Mapping[str, Any]]:
        for loss in items:
            failed.update([loss.partition] if loss.reason == FAILED else [])
            yield loss.to_json()

    def left() -> Iterator[str]:  # after the losses: those that neither are published nor failed
        yield from (key for key in unpublished if key not in failed)

    return {"totals": totals_document(totals), "losses": noted(), "unpublished": left()}
