"""`mm-assets register`: the shards become partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, report_registration, wait_for_shards
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.state.records import Registered

_SHOWN = 10  # partitions that are listed


@click.command()
@dataset_options(undeclared=True)
@click.option("--new-schema", is_flag=True, help="Decide the dataset's schema again; what it changes becomes pending.")
@click.option("--verbose", "-v", is_flag=True, help=f"List every partition, not the first {_SHOWN} alone.")
@json_option
def command(chosen: DatasetChoice, new_schema: bool, verbose: bool) -> None:
    """List the shards and make them partitions of the Dagster instance."""
    from mm_assets.orchestration.launch import open_instance, register_dataset, start_rollup
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.staleness import pending_partitions

    specs = chosen.specs()
    document: dict[str, Any] = {}
    with open_instance() as instance:
        for spec in specs:
            dataset = DatasetStore(spec)
            before = _layout(dataset.registered())
            found = register_dataset(instance, dataset, new_schema=new_schema, sleep=wait_for_shards(spec))
            line = f"{spec.name}: {counted(len(found.partitions), 'partition')}"
            for what, named in (("new", found.added), ("changed", found.changed), ("gone", found.removed)):
                line += f", {len(named):,} {what}" if named else ""
            echo(line)
            document[spec.name] = {
                "partitions": [partition.key for partition in found.partitions],
                "new": list(found.added),
                "changed": list(found.changed),
                "gone": list(found.removed),
                "unsettled": list(found.unsettled),
                "skipped": list(found.skipped),
                "notes": [] if found.decision is None else list(found.decision.notes),
                "schema": None,
            }
            if new_schema:
                stored = dataset.registered()
                preset = dataset.schema(stored).pack.get("preset") or "none"
                is_same = _layout(stored) == before
                layout = "the same layout" if is_same else "a new layout"
                pending = len(pending_partitions(dataset))
                decided = {"is_new": not is_same, "preset": dataset.schema(stored).pack.get("preset")}
                document[spec.name]["schema"] = {**decided, "pending": pending}
                number = f"{pending:,} of {counted(len(found.partitions), 'partition')}"
                echo(f"{spec.name}: decided again: {layout}, preset {preset}; {number} pending")
            report_registration(chosen, spec, found, start_rollup(instance, dataset, len(found.partitions)))
            keys = [partition.key for partition in found.partitions]
            for key in keys if verbose else keys[:_SHOWN]:
                echo(f"  {key}")
            if len(keys) > _SHOWN and not verbose:
                echo(f"  and {len(keys) - _SHOWN:,} more: -v lists them")
    write_document({"datasets": document})


def _layout(registered: Registered) -> Mapping[str, Any]:
    """The stored schema without what it was decided from."""
    decided = ("declared", "decided_by", "evidence")
    return {name: value for name, value in registered.stored_schema.items() if name not in decided}
