"""`mm-assets init`: a `defs.yaml` for a dataset of shards, with what a sample of them gives, in the project's folder.

A declaration is a template for Dagster, and names in it come from shards: what could be one is left out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options, parsed_settings
from mm_assets.cli.output import echo, print_next, printable, report_skipped
from mm_assets.cli.project import declarations_folder, make_project, project_folder
from mm_assets.cli.secrets import is_secret
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.schema_inference import Decision

_TYPE = "mm_assets.orchestration.ShardDataset"
_TEMPLATE = ("{{", "{%", "{#")


@click.command()
@dataset_options(undeclared=True, single=True)
@click.option("--project", "makes_project", is_flag=True, help="Make a Dagster project here, where there is none.")
@json_option
def command(chosen: DatasetChoice, makes_project: bool) -> None:
    """Write a defs.yaml for a dataset of SHARDS into the project, with what a sample has: source, columns, fields.

    SHARDS is a folder, glob or URL. A file that is there is never overwritten. Nothing is registered or packed.
    """
    from mm_assets.pipeline.state.registration import list_shards, no_shards
    from mm_assets.pipeline.state.schema_inference import decide_layout

    if chosen.shards is None:
        raise ConfigError("arguments", "SHARDS", "is missing: give a folder, glob or URL of the shards")
    if project_folder(Path.cwd()) is None and not makes_project:
        detail = f"there is no Dagster project in {Path.cwd()} or above it: --project makes one here"
        raise ConfigError("arguments", "--project", detail)
    (spec,) = chosen.specs(read_only=True)
    partitions, skipped = list_shards(spec)
    if not partitions:
        raise no_shards(spec, skipped)
    report_skipped(spec.name, skipped)
    decision = decide_layout(spec, sorted(shard.url for partition in partitions for shard in partition.shards))
    made = make_project(Path.cwd()) if project_folder(Path.cwd()) is None else ()
    if not made and spec.name in chosen.declared():
        raise ConfigError("arguments", "--dataset", f"{spec.name!r} is declared already: give another name")
    file = declarations_folder(Path.cwd()) / spec.name / "defs.yaml"
    secrets: dict[str, str] = {}
    text = _declaration(chosen, spec, decision, is_packed=_is_packed(spec), secrets=secrets)
    _write_new(file, text)
    for path in made:
        echo(f"wrote {path}")
    echo(f"wrote {file}")
    for note in decision.notes:
        echo(f"note: {note}", err=True)
    declared = replace(chosen, shards=None, root=None, pack=None, settings=())
    steps = [declared.complete(step) for step in _next_steps(spec)]
    for variable, option in secrets.items():
        echo(f"set the environment variable {variable}: the file has it in place of the {option}")
    print_next(steps)
    write_document(
        {"datasets": {spec.name: {"file": str(file), "declaration": text, "made": list(map(str, made)), "next": steps}}}
    )


def _next_steps(spec: DatasetSpec) -> Iterator[str]:
    name = shlex.quote(spec.name)
    yield f"`mm-assets run --dataset {name}` packs it"
    yield f"`mm-assets status --dataset {name}` shows what is pending"
    yield "docs/settings.md has every key of the file: filters, annotators, samples, pack"


def _write_new(file: Path, text: str) -> None:
    """Writes a file that is not there; two commands at a time do not overwrite each other's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        detail = f"{file} is there already: give another name with --dataset, or edit the file"
        raise ConfigError("arguments", "--dataset", detail) from error


def _is_packed(spec: DatasetSpec) -> bool:
    """Whether the dataset is there, made of these shards with these settings: to name more of them would change it."""
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.registration import refusal

    dataset = DatasetStore(spec)
    return spec.is_made_from(dataset.registered().source) and refusal(dataset) is None


def _declaration(
    chosen: DatasetChoice, spec: DatasetSpec, decision: Decision, *, is_packed: bool, secrets: dict[str, str]
) -> str:
    """The text of the file: what was given, and what was inferred.

    Args:
        chosen: what was given.
        spec: the declaration that it makes.
        decision: the layout, and its evidence.
        is_packed: whether the dataset is there, so that what was inferred is a comment.
        secrets: takes the variables that stand for secrets, with the name of the option of each.
    """
    given = parsed_settings(chosen.settings)
    for name in ("storage_options", "root_options"):
        options = getattr(spec, name)
        if options:
            given[name] = _without_secrets(options, f"{spec.name}_{name}", secrets)
    samples, _, _ = given.pop("samples", {}), given.pop("pack", None), given.pop("source", None)
    sampled = f"{counted(decision.num_samples, 'sample')} of {counted(len(decision.shards), 'shard')}"
    lines = [
        f"# Written by `mm-assets init`, from {sampled} of {decision.num_shards:,}. docs/settings.md has every key.",
        f"type: {_TYPE}",
        "attributes:",
        *_entry("name", spec.name),
        *_entry("shards", _plain(spec, "shards", spec.shards)),
    ]
    if chosen.root is not None:
        lines += _entry("root", _plain(spec, "root", spec.root))
    source, pack = spec.source or _detected(spec, decision), spec.declared["pack"] or decision.schema.pack["preset"]
    if is_packed:
        lines.append(
            "  # It is packed with these settings. Those with a # were inferred: to set one decides the layout again."
        )
    if source is not None:
        lines += _entry("source", source, is_comment=is_packed and spec.source is None)
    lines += _samples(samples, decision, is_packed=is_packed)
    lines += [line for name, value in given.items() for line in _entry(name, value)]
    packed = [f"{m['name']} ({m['field']})" for m in decision.schema.pack["modalities"]]
    lines.append(f"  # Packed: {printable(', '.join(packed))}.")
    if pack is not None:
        lines += _entry("pack", pack, is_comment=is_packed and not spec.declared["pack"])
    return "\n".join(lines) + "\n"


def _without_secrets(options: Mapping[str, Any], name: str, secrets: dict[str, str]) -> dict[str, Any]:
    """Options with a variable of the environment in place of each secret, which belongs into no file."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            found[key] = _without_secrets(value, f"{name}_{key}", secrets)
        elif is_secret(key) and value is not None and not isinstance(value, bool):
            variable = re.sub(r"\W+", "_", f"{name}_{key}").upper()
            secrets[variable] = key
            found[key] = f"{{{{ env.{variable} }}}}"
        else:
            found[key] = value
    return found


def _samples(given: Mapping[str, Any], decision: Decision, *, is_packed: bool) -> Iterator[str]:
    """The setting `samples`; its columns are a comment where not every sample has all of them."""
    of_items = {*given.get("per_image_fields", ()), *given.get("per_text_fields", ())}
    every = [column for column in decision.columns if column.source not in of_items]
    columns = [column.source for column in every if column.source.strip() and not _may_be_template(column.source)]
    is_settled = 0 < len(columns) == len(every) and all(c.num_samples >= decision.num_samples for c in every)
    if "user_columns" not in given and is_settled and not is_packed:
        given = {**given, "user_columns": columns}
    if given:
        yield from _entry("samples", given)
    if columns and "user_columns" not in given:
        yield "  # Columns: every key of the samples' JSON. To name them, though shards without one of them fail then:"
        yield f"  # samples: {{user_columns: {json.dumps(columns)}}}"


def _entry(name: str, value: Any, *, is_comment: bool = False) -> Sequence[str]:
    """The lines of a key in YAML, below `attributes`."""
    import yaml

    flow = None if isinstance(value, dict | list | tuple) else False  # of collections, the innermost in one line
    text: str = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=110, default_flow_style=flow)
    return [f"  {'# ' if is_comment else ''}{line}" for line in text.splitlines()]


def _plain(spec: DatasetSpec, key: str, value: str) -> str:
    if _may_be_template(value):
        raise ConfigError("arguments", key, f"is {value!r}: Dagster takes braces in a declaration for a template")
    return value


def _may_be_template(text: str) -> bool:
    return any(mark in text for mark in _TEMPLATE)


def _detected(spec: DatasetSpec, decision: Decision) -> str | None:
    """The name of the format that all sampled shards have; None where they differ, or one of them is of none."""
    from mm_assets.errors import SourceError
    from mm_assets.rows.base import source_formats
    from mm_assets.sources.base import detect
    from mm_assets.storage.files import SourceFile

    formats = source_formats(None, where=spec.where)
    found: set[str] = set()
    for shard in decision.shards:
        if shard.error is not None:
            return None
        try:
            with SourceFile(shard.url, storage_options=spec.storage_options) as file:
                found |= {name for name, of in formats.items() if of is detect(file, formats)}
        except SourceError:
            return None
    return found.pop() if len(found) == 1 else None
