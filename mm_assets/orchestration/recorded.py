"""Whether Dagster has recorded all that a dataset has published: asked without Dagster, which takes a second to import.

Only of a local instance, whose databases are SQLite files. The questions are those of a recorder that begins: whether
Dagster knows the partitions, their newest versions and exports, and the manifest, and no run of a load is unfinished.
Anything unexpected counts as not recorded, and then a recorder asks Dagster itself.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from mm_assets.pipeline.chain import MANIFEST, PUBLISHED, Stage, export_stage
from mm_assets.pipeline.dagster_home import has_own_databases
from mm_assets.pipeline.state.exports import complete_exports, export_folders
from mm_assets.pipeline.state.registration import Registration
from mm_assets.pipeline.state.staleness import DatasetState

__all__ = ["is_recorded"]

_RUNS, _EVENTS = "history/runs.db", "history/runs/index.db"
_UNFINISHED = "SELECT 1 FROM runs WHERE pipeline_name = ? AND status NOT IN ('SUCCESS', 'FAILURE', 'CANCELED') LIMIT 1"
_PARTITIONS = "SELECT partition, '' FROM dynamic_partitions WHERE partitions_def_name = ?"
_WIPED = "SELECT 1 FROM asset_keys WHERE asset_key = ? AND wipe_timestamp IS NOT NULL"
_VERSIONS = """
SELECT latest.partition, tag.value
FROM (
    SELECT partition, max(id) AS id FROM event_logs
    WHERE asset_key = ? AND dagster_event_type = 'ASSET_MATERIALIZATION' GROUP BY partition
) AS latest
JOIN asset_event_tags AS tag ON tag.event_id = latest.id AND tag.key = 'dagster/data_version'
"""


def is_recorded(home: Path, state: DatasetState, found: Registration) -> bool:
    """Whether a load without partitions, whose manifest is the newest one, would record nothing.

    Args:
        home: folder of the Dagster instance.
        state: the dataset as it was listed.
        found: what registration found.

    Raises:
        SourceError: the storage cannot be read.
    """
    if found.added or found.changed or found.decision is not None:
        return False
    try:
        if not has_own_databases(home):
            return False
        with closing(_opened(home / _RUNS)) as runs, closing(_opened(home / _EVENTS)) as events:
            return not any(_unrecorded(runs, events, state))
    except (OSError, sqlite3.Error):
        return False


def _opened(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)


def _unrecorded(runs: sqlite3.Connection, events: sqlite3.Connection, state: DatasetState) -> Iterator[bool]:
    """Yields for each question whether Dagster lacks something."""
    spec = state.dataset.spec
    yield bool(runs.execute(_UNFINISHED, (f"{spec.name}_load",)).fetchall())
    yield not state.partitions.keys() <= dict(events.execute(_PARTITIONS, (f"{spec.name}_shards",))).keys()
    published = state.published()
    stages: dict[Stage, Mapping[str | None, str]] = {
        MANIFEST: {None: state.digest or ""},
        PUBLISHED: {key: entry.recipe for key, entry in published.items()},
    }
    for options in spec.exports:
        complete = complete_exports(state.dataset, options)
        folders = export_folders(state.dataset, options, published.values())
        stages[export_stage(options)] = {key: folder for key, folder in folders.items() if folder in complete}
    for stage, versions in stages.items():
        asset = json.dumps([spec.name, stage.name])
        yield bool(events.execute(_WIPED, (asset,)).fetchall())
        yield not versions.items() <= dict(events.execute(_VERSIONS, (asset,))).items()
