"""`mm-assets plan`: the layout that registration would decide, and why, before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, print_table, report_skipped
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.packing.kinds import SampleKind
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.schema_inference import Decision

_SHOWN = 20  # lines of one table; --json gives all that schema.json has


@click.command()
@dataset_options(undeclared=True)
@json_option
def command(chosen: DatasetChoice) -> None:
    """Show which layout a sample of SHARDS gives, and why; nothing is registered or written.

    SHARDS is a folder, glob or URL; of a declared dataset give --dataset instead.
    """
    from mm_assets.pipeline.state.registration import list_shards, no_shards
    from mm_assets.pipeline.state.schema_inference import decide_layout

    planned = {}
    for spec in chosen.specs(read_only=True, needs_home=False):
        partitions, skipped = list_shards(spec)
        if not partitions:
            raise no_shards(spec, skipped)
        decision = decide_layout(spec, sorted(shard.url for partition in partitions for shard in partition.shards))
        planned[spec.name] = {
            "partitions": len(partitions),
            "skipped": list(skipped),
            **decision.schema.to_json(),
            **_evidence(decision),
        }
        report_skipped(spec.name, skipped)
        if not wants_json():
            _print_plan(spec, decision, len(partitions))
            _print_next(chosen, spec, decision)
    write_document({"datasets": planned})


def _print_next(chosen: DatasetChoice, spec: DatasetSpec, decision: Decision) -> None:
    """Writes the command that follows, or how the layout of the registered dataset differs."""
    from mm_assets.pipeline.state.folder import DatasetStore

    dataset = DatasetStore(spec)
    name = ["--dataset", spec.name] if chosen.shards is None or chosen.names else []
    if not spec.is_made_from(dataset.registered().source):
        command = shlex.join(["mm-assets", "run", *name])
        echo(f"to pack them: {chosen.complete(f'`{command}`')}")
    elif dataset.schema().digest == decision.schema.digest:
        echo("the registered layout is the same")
    else:
        command = shlex.join(["mm-assets", "register", *name, "--new-schema"])
        echo(f"the registered layout is another: {chosen.complete(f'`{command}`')} replaces it")


def _evidence(decision: Decision) -> dict[str, object]:
    return {"decided_by": decision.decided_by, "evidence": decision.evidence()}


def _print_plan(spec: DatasetSpec, decision: Decision, num_partitions: int) -> None:
    from mm_assets.packing.kinds import group_name
    from mm_assets.packing.presets import chooses_preset

    sampled = f"{counted(decision.num_samples, 'sample')} of {counted(len(decision.shards), 'shard')}"
    echo(f"{spec.name}: {counted(decision.num_shards, 'shard')}, {counted(num_partitions, 'partition')}")
    echo(f"decided from: {sampled}")
    preset = decision.schema.pack["preset"] or "none: the declared fields"
    echo(f"preset: {preset} ({'chosen from the samples' if chooses_preset(spec.pack) else 'declared'})")
    if chooses_preset(spec.pack):
        echo(f"because: {_why(preset)}")
    _print_table(
        ("kind of sample", "samples", "decides", "not packed"),
        [
            (str(kind), f"{kind.num_samples:,}", "yes" if kind.fits else "no: odd", _not_packed(spec, kind))
            for kind in decision.kinds
        ],
        numbers=(1,),
    )
    _print_table(
        ("kind of row", "samples", "rows", "extensions", "packed as"),
        [
            (
                group_name(row.modality, row.role),
                f"{row.num_samples:,}",
                f"{row.num_rows:,}",
                _counts(row.extensions),
                ", ".join(row.packed_as) or "nothing: dropped",
            )
            for row in decision.row_kinds
        ],
        numbers=(1, 2),
    )
    modalities = [(m["name"], _field(m), m.get("take", "parts")) for m in decision.schema.pack["modalities"]]
    _print_table(("packed modality", "field", "takes"), modalities)
    _print_table(
        ("column", "type", "samples", "values"),
        [(c.name, c.type, f"{c.num_samples:,}", _counts(c.types) or "all null") for c in decision.columns],
        numbers=(2,),
    )
    for note in decision.notes:
        echo(f"note: {note}", err=True)


def _not_packed(spec: DatasetSpec, kind: SampleKind) -> str:
    if kind.example or spec.on_empty_sample == "keep":
        return ", ".join(kind.unplaced)
    return "all: no content"


def _field(modality: Mapping[str, Any]) -> str:
    inner = modality["config"].get("inner")
    return f"{modality['field']}({inner['type']})" if inner else str(modality["field"])


def _counts(numbers: Mapping[str, int]) -> str:
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name or 'none'} {count:,}" for name, count in ordered[:3])
    return shown + (", …" if len(ordered) > 3 else "")


def _why(preset: str) -> str:
    from mm_assets.packing.kinds import REASONS

    return REASONS[preset]


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> None:
    """A table without the columns that are empty in every line; none without lines."""
    if not lines:
        return
    used = [n for n in range(len(headings)) if any(line[n] for line in lines)]
    print_table(
        [headings[n] for n in used],
        [[line[n] for n in used] for line in lines[:_SHOWN]],
        numbers=[headings[n] for n in numbers],
        wrapped=(headings[used[-1]],),
    )
    if len(lines) > _SHOWN:
        echo(f"and {len(lines) - _SHOWN:,} more")
