"""What a dataset version was made with, noted in the cache, so that two versions can be compared.

A manifest lists files and does not depend on where or when they were made. Which settings, code and shards they came
from is known while it is written, and gone when the next run replaces records and tables. Without this file, or where
another release wrote it, a comparison names what differs and not why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_assets.errors import SourceError
from mm_assets.pipeline.chain import CHAIN, Stage
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, canonical_json
from mm_assets.rows.schema import DatasetSchema

__all__ = ["VersionFacts", "facts_name", "note_facts", "read_facts", "setting_changes", "surplus_facts"]

FOLDER = "cache/versions"
_VERSION = 1
_DIGITS = 16
_MOST_SAID = 20  # settings that one comparison names
_MAX_VALUE = 80  # characters of a value in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What a version was made with.

    Attributes:
        made_with: by stage `Stage.made_with`.
        settings: by stage the values of the settings that change its files.
        shards: by partition a digest of the names and fingerprints of its shards.
    """

    made_with: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, Mapping[str, Any]]
    shards: Mapping[str, str]

    def changed_stages(self, after: VersionFacts) -> Iterator[tuple[Stage, str]]:
        """The stages that were made with something else then, and what, in words."""
        for stage in CHAIN:
            before, now = self.made_with.get(stage.name), after.made_with.get(stage.name)
            if before is not None and now is not None and (said := stage.changed(before, now)):
                yield stage, said


def facts_name(digest: str) -> str:
    """Name of the file of a version; `digest` is that of its manifest."""
    return f"{FOLDER}/{digest}.json"


def note_facts(dataset: DatasetStore, digest: str, schema: DatasetSchema, partitions: Mapping[str, Partition]) -> None:
    """Stores what a version has just been made with; `partitions` are those that it lists, as registered."""
    spec = dataset.spec
    stages = [stage for stage in CHAIN if stage.files and stage.is_made(spec)]
    content = canonical_json(
        {
            "version": _VERSION,
            "stages": {
                stage.name: {"made_with": stage.made_with(spec, schema), "config": _plain(stage.settings(spec))}
                for stage in stages
            },
            "partitions": {key: _shards_digest(partition) for key, partition in sorted(partitions.items())},
        }
    )
    # Another process that writes it at this moment has made the same version. A full disk failed the manifest.
    with suppress(SourceError):
        dataset.store.write_bytes(facts_name(digest), content, durable=False)


def read_facts(dataset: DatasetStore, digest: str) -> VersionFacts | None:
    """What a version was made with, or None where that is not known.

    Raises:
        SourceError: the storage could not be read.
    """
    content = dataset.store.found_bytes(facts_name(digest))
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # a file of the cache may be damaged
        value = {} if content is None else json.loads(content)
        if value["version"] == _VERSION:
            return VersionFacts(
                made_with={stage: dict(made["made_with"]) for stage, made in value["stages"].items()},
                settings={stage: dict(made["config"]) for stage, made in value["stages"].items()},
                shards=dict(value["partitions"]),
            )
    return None


def surplus_facts(dataset: DatasetStore, manifests: Iterable[str]) -> dict[str, int]:
    """The files of versions other than those of these manifests, with their bytes.

    Raises:
        SourceError: the storage could not be read.
    """
    kept = {f"{FOLDER}/{name.rsplit('/', 1)[-1]}" for name in manifests}
    return {name: size for name, size in dataset.store.sizes(FOLDER).items() if name not in kept}


def _shards_digest(partition: Partition) -> str:
    # Without the folders: a copy of the shards somewhere else is the same input.
    named = sorted((shard.url.rsplit("/", 1)[-1], shard.fingerprint) for shard in partition.shards)
    return hashlib.sha256(canonical_json(named)).hexdigest()[:_DIGITS]


def _plain(settings: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(settings), default=str))


def setting_changes(before: Any, after: Any, name: str = "") -> list[str]:
    """What differs between two values of settings, one clause each, such as ``filters.blur.min: 100 -> 120``."""
    found = list(_changes(before, after, name))
    more = [f"and {len(found) - _MOST_SAID:,} more"] if len(found) > _MOST_SAID else []
    return found[:_MOST_SAID] + more


def _changes(before: Any, after: Any, name: str) -> Iterator[str]:
    before, after = _keyed(before), _keyed(after)
    if before == after:
        return
    if {} in (before, after) or [] in (before, after):  # no filters at first, or none any more
        before, after = before or {}, after or {}
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{name}.{key}" if name else str(key)
            if key not in before:
                yield f"{inner}: new, {_said(after[key])}"
            elif key not in after:
                yield f"{inner}: removed, was {_said(before[key])}"
            else:
                yield from _changes(before[key], after[key], inner)
    else:
        yield f"{name}: {_said(before)} -> {_said(after)}"


def _keyed(value: Any) -> Any:
    """A list of filters, annotators or columns by their names: where one is added, the others have not moved."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        names = [str(one.get("name") or one.get("type") or "") for one in value]
        if len(set(names)) == len(names) and all(names):
            return dict(zip(names, value, strict=True))
    return value


def _said(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"
