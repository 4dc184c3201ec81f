"""What the exploring pages ask about the dataset that is looked at; answers as JSON, without a request in sight."""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from mm_assets.dataset.manifest import file_path
from mm_assets.display import Content, Item, content_item
from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, ROWS
from mm_assets.pipeline.explore import diff as history
from mm_assets.pipeline.explore import histograms as measures
from mm_assets.pipeline.explore import provenance as places
from mm_assets.pipeline.explore.sql import QueryError, Sandbox, columns_of_relations, dataset_sandbox
from mm_assets.pipeline.state.losses import Selection, loss_page, recorded_totals
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.sql import sql_name, sql_text
from mm_assets.storage.urls import is_local
from mm_assets.view.backends.base import Backend, Entry, NoSampleError
from mm_assets.view.backends.folder import FolderBackend, FolderListing, open_dataset_store
from mm_assets.view.sample_table import ordered_rows

__all__ = ["Explorer", "explorer_of"]

THREADS = 3  # beside those that read samples, which a slow answer must not hold
QUERIES = 2  # at a time; further ones wait, and hold no thread
_SANDBOXES = 4  # of the latest manifests: their queries may be running
_CANCELLED = 64  # names of cancelled queries that are remembered
PAGE = 50
MAX_DIFF_PARTITIONS = 20  # that one request compares
MAX_OPEN_ROWS = 32  # whose content is asked for in pieces
MAX_HELD_BYTES = 96 << 20  # of what cannot be read in pieces
_DIFFS = 4
_MANIFEST = re.compile(r"(.+?)/(?:manifests/[0-9a-f]{64}|manifest)\.json")
_ROW_TABLES = tuple(stage.tables[0].name for stage in (ROWS, MATERIALIZED_ROWS, FILTERED_ROWS))


def explorer_of(backend: Backend) -> Explorer | None:
    """The explorer of what is looked at, or None if it is not a dataset's folder, or a local manifest in one."""
    if isinstance(backend, FolderBackend):
        return Explorer(backend.listing, backend)
    manifest = _MANIFEST.fullmatch(backend.title)
    if manifest is None or not is_local(manifest[1]):
        return None
    try:
        dataset = open_dataset_store(manifest[1])
        return Explorer(FolderListing(dataset), backend) if dataset.store.exists("shards.json") else None
    except ConfigError:  # a manifest may be in any folder
        return None


class Explorer:
    """Versions, losses, scores, origins and SQL of one dataset; safe for several threads.

    Args:
        listing: the dataset as it was listed.
        backend: what is looked at.

    Attributes:
        dataset: the dataset's folder.
        threads: where its answers are made.
        query_threads: where queries are waited for.
    """

    def __init__(self, listing: FolderListing, backend: Backend) -> None:
        self.dataset = listing.dataset
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="explore")
        self.query_threads = ThreadPoolExecutor(QUERIES, thread_name_prefix="queries")
        self._listing = listing
        self._backend = backend
        self._lock = threading.Lock()
        self._sandboxes: deque[tuple[str | None, Sandbox]] = deque(
            maxlen=_SANDBOXES
        )  # by digest, the newest is the last
        self._cancelled: deque[str] = deque(maxlen=_CANCELLED)
        self._diffs: OrderedDict[tuple[str, str], history.VersionDiff] = OrderedDict()
        self._rows: OrderedDict[tuple[Any, ...], places.StoredContent] = OrderedDict()

    @property
    def state(self) -> DatasetState:
        """The dataset as it was listed some seconds ago at most."""
        return self._listing.state

    # --- SQL ----------------------------------------------------------------------------------------------------------

    def sandbox(self) -> Sandbox:
        """The sandbox over what the newest manifest lists."""
        state = self.state
        with self._lock:
            known = self._sandboxes[-1] if self._sandboxes else None
        if known is not None and known[0] == state.digest:
            return known[1]
        sandbox = dataset_sandbox(state, cancelled=self._cancelled)
        with self._lock:
            self._sandboxes.append((state.digest, sandbox))
        return sandbox

    def relations(self) -> dict[str, Any]:
        """The relations and their columns."""
        found = columns_of_relations(self.state)
        return {"relations": [{"name": name, "columns": columns} for name, columns in found.items()]}

    def query(self, sql: str, key: str) -> dict[str, Any]:
        """The result of a query, or why there is none and where in its text."""
        try:
            return self.sandbox().run(sql, key=key).to_json()
        except QueryError as error:
            return {"error": error.message, "line": error.line, "column": error.column}

    def cancel(self, key: str) -> dict[str, Any]:
        """Ends a query, or keeps it from beginning; whether it was running."""
        self._cancelled.append(key)  # its sandbox may not be made yet
        with self._lock:
            sandboxes = [sandbox for _, sandbox in self._sandboxes]
        return {"cancelled": any(sandbox.cancel(key) for sandbox in sandboxes)}

    def select(
        self, relation: str, where: str, order: str, direction: str, offset: int, limit: int, *, part: str = ""
    ) -> tuple[dict[str, Any], Sequence[tuple[str, Entry]]]:
        """Samples with a row that meets a condition, ordered by a column, and the cards of those that are packed.

        `limit` and `offset` count rows, of which a page may have several of one sample. A `part` is a partition, of
        whose samples they are then.

        Raises:
            ConfigError: there is no such relation, or the direction is not one.
        """
        sandbox = self.sandbox()
        if relation not in sandbox.names or not relation.isidentifier():
            raise ConfigError("arguments", "relation", f"{relation!r} is none of {', '.join(sandbox.names)}")
        partition = "" if part.startswith("@") else part.partition("/")[0]
        conditions = [f"partition = {sql_text(partition)}"] if partition else []
        if not where.strip() and not order and relation in _ROW_TABLES:
            conditions += ["position = -1"]  # the metadata row, of which each sample has one
        found = ordered_rows(
            sandbox,
            relation,
            columns=("partition", "sample_id"),
            where=where,
            conditions=conditions,
            by=sql_name(order) if order else "",
            direction=direction,
            offset=offset,
            limit=limit,
        )
        if found.error is not None:
            return dict(found.error), ()
        by_sample: dict[tuple[Any, Any], tuple[Any, ...]] = {}
        for row in found.rows:
            by_sample.setdefault((row[0], row[1]), row)
        rows = list(by_sample.values())
        cards = self._cards([(str(row[0]), str(row[1])) for row in rows])
        answer = {
            "rows": [{"partition": row[0], "sample_id": row[1], "value": row[2]} for row in rows],
            "next": offset + limit if found.more else None,
        }
        return answer, cards

    def _cards(self, samples: Sequence[tuple[str, str]]) -> list[tuple[str, Entry]]:
        """The cards of samples by their partition, in the order given; one that is not packed says so."""
        found: list[tuple[str, Entry]] = []
        for partition, sample_id in samples:
            place = self.locate(partition, sample_id)
            if place["n"] is None:
                found.append(("", Entry(index=-1, id=sample_id, note=self._why_not_packed(partition, sample_id))))
                continue
            part, index = place["part"], place["n"]
            backend = self._backend.partition(part) if part else self._backend
            found.append((part, backend.entries([index])[0]))
        return found

    def _why_not_packed(self, partition: str, sample_id: str) -> str:
        try:
            rows = places.origins(self.state, partition, sample_id)
        except SourceError:  # a reject of a partition without rows, for instance
            rows = []
        reasons = dict.fromkeys(row.dropped or row.error for row in rows)
        return f"not packed: {', '.join(filter(None, reasons)) or f'of partition {partition}'}"

    # --- places -------------------------------------------------------------------------------------------------------

    def locate(self, partition: str, sample_id: str) -> dict[str, Any]:
        """Where the viewer shows a sample: the partition and its number in it, or in the whole; else no number."""
        if partition and isinstance(self._backend, FolderBackend):
            try:
                index = self._backend.partition(partition).index_of(sample_id)
            except NoSampleError:
                index = None
            return {"part": partition, "n": index}
        return {"part": "", "n": self._backend.index_of(sample_id)}

    def partition_of(self, part: str, index: int) -> str | None:
        """The partition of a sample that is shown, by the partition that is chosen or the order of the manifest."""
        if part and not part.startswith("@"):
            return part.partition("/")[0]
        state, entries = self.state, self.state.listed
        shown = self._backend.title if _MANIFEST.fullmatch(self._backend.title) else None
        if isinstance(self._backend, FolderBackend):
            shown = self._backend.shown_digest(part)
        if shown is not None and shown != state.digest:
            try:
                entries = history.find_version(self.dataset, shown).partitions
            except ConfigError:
                return None
        ends = accumulate(entry.num_samples for entry in entries.values())
        return next((key for key, end in zip(entries, ends, strict=True) if index < end), None)

    def origin(self, partition: str, sample_id: str) -> dict[str, Any]:
        """The rows of a sample, and the packed files of its partition."""
        rows = places.origins(self.state, partition, sample_id)
        files = {
            form: {"path": file_path(form, key, sha256), "size": size, "sha256": sha256}
            for key, entry in self.state.published([partition], outdated=True).items()
            for form, (size, sha256) in entry.packed.items()
        }
        return {"partition": partition, "sample_id": sample_id, "rows": [asdict(row) for row in rows], "packed": files}

    def at(self, shard: str, member: str, byte: int | None) -> dict[str, Any]:
        """The rows whose content is at a place in a shard."""
        found = []
        keys = places.partitions_of(self.state, shard) if shard else []
        for key in keys[:MAX_DIFF_PARTITIONS]:
            found += places.samples_at(self.state, key, shard=shard, member=member or None, byte=byte)
        return {"partitions": keys, "rows": [asdict(row) for row in found]}

    def content(self, of: Mapping[str, Any]) -> places.StoredContent:
        """The content of a row, or of a member that became none; the last few stay open.

        Raises:
            NoSampleError: there is no such row or member.
        """
        key = tuple(sorted((name, str(value)) for name, value in of.items()))
        with self._lock:
            found = self._rows.get(key)
            if found is not None:
                self._rows.move_to_end(key)
        if found is None:
            found = self._content(of)
            with self._lock:
                self._rows[key] = found
                held = sum(one.bytes_in_memory for one in self._rows.values())
                while len(self._rows) > MAX_OPEN_ROWS or (held > MAX_HELD_BYTES and len(self._rows) > 1):
                    held -= self._rows.popitem(last=False)[1].bytes_in_memory
        return found

    def _content(self, of: Mapping[str, Any]) -> places.StoredContent:
        partition = of["partition"]
        if of.get("member"):
            found = places.member_content(
                self.state, partition, shard=of["shard"], member=of["member"], byte_offset=of.get("byte_offset")
            )
        else:
            found = places.row_content(self.state, partition, of["sample_id"], of["position"], of["modality"])
        if found is None:
            raise NoSampleError(f"partition {partition!r} has no such row or member")
        # Another request may still read it when it is no longer among the last few.
        weakref.finalize(found.read, found.close)
        return found

    def item(self, of: Mapping[str, Any]) -> Item:
        """What people see of that content; errors as `content`."""
        found = self.content(of)
        name = str(of.get("member") or of.get("modality") or "content")
        return content_item(name, Content(found.size, found.read), found.content_type)

    def checksum(self, of: Mapping[str, Any]) -> dict[str, Any]:
        """The checksums of that content as it is read now; errors as `content`."""
        return places.checksums(self.content(of))

    # --- losses and scores --------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, Any]:
        """What was lost or has a fault, by stage and reason."""
        found = recorded_totals(self.state)
        return {"totals": [{**total.example.to_json(), "count": total.count} for total in found]}

    def losses(self, stage: str, reason: str, partition: str, after: str) -> dict[str, Any]:
        """A page of losses."""
        selection = Selection(stage=stage or None, reason=reason or None)
        page = loss_page(self.state, selection, partition=partition or None, after=after, limit=PAGE)
        return {"losses": [item.to_json() for item in page.items], "after": page.after}

    def scores(self) -> dict[str, Any]:
        """The measures with their limits."""
        return {"scores": [asdict(score) for score in measures.scores(self.state)]}

    def histogram(self, name: str, bins: int, partition: str) -> dict[str, Any]:
        """The histogram of a measure."""
        return asdict(measures.histogram(self.state, name, bins=bins, partition=partition or None))

    def kept(self, name: str, at_least: float | None, at_most: float | None, partition: str) -> dict[str, Any]:
        """What other limits would keep."""
        return asdict(
            measures.kept_by(self.state, name, at_least=at_least, at_most=at_most, partition=partition or None)
        )

    # --- versions -----------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, Any]:
        """The versions, the newest first."""
        return {"versions": [asdict(version) for version in history.list_versions(self.dataset)]}

    def _diff(self, old: str, new: str) -> history.VersionDiff:
        found = history.find_version(self.dataset, _named(old)), history.find_version(self.dataset, _named(new))
        key = found[0].digest, found[1].digest
        with self._lock:
            known = self._diffs.get(key)
        if known is None:
            known = history.diff(self.dataset, *found)
            with self._lock:
                self._diffs[key] = known
                while len(self._diffs) > _DIFFS:
                    self._diffs.popitem(last=False)
        return known

    def diff(self, old: str, new: str, offset: int) -> dict[str, Any]:
        """Some of the partitions that differ between two versions, and what is true of both as a whole."""
        found = self._diff(old, new)
        keys = found.keys[offset : offset + MAX_DIFF_PARTITIONS]
        left = offset + len(keys) < len(found.keys)
        return {
            "old": found.old.digest,
            "new": found.new.digest,
            "num_old": found.old.num_samples,
            "num_new": found.new.num_samples,
            "settings": found.settings,
            "unchanged": found.unchanged,
            "total": len(found.keys),
            "partitions": [asdict(found.partition(key)) for key in keys],
            "next": offset + len(keys) if left else None,
        }

    def diff_samples(self, old: str, new: str, partition: str, offset: int) -> dict[str, Any]:
        """A page of the samples of one partition that differ.

        Raises:
            ConfigError: the partition does not differ.
        """
        found = self._diff(old, new)
        if partition not in found.keys:
            raise ConfigError("arguments", "partition", f"{partition!r} does not differ between these versions")
        samples = list(found.samples(partition, offset=offset, limit=PAGE + 1))
        more = len(samples) > PAGE
        return {"samples": [asdict(sample) for sample in samples[:PAGE]], "next": offset + PAGE if more else None}

    def compare(self, old: str, new: str, partition: str, sample_id: str) -> dict[str, Any]:
        """Where the viewer shows a sample of two versions, and which of its modalities differ.

        Raises:
            ConfigError: there is no such version, or what is looked at is not the folder.
            NoSampleError: neither version has the sample.
        """
        if not isinstance(self._backend, FolderBackend):
            raise ConfigError(
                "arguments", "X", "versions of a sample are compared where the dataset's folder is opened"
            )
        sides: list[tuple[dict[str, Any], dict[str, tuple[int, int | None]]]] = []
        for name in (old, new):
            version = history.find_version(self.dataset, _named(name))
            part = f"@{version.digest}"
            backend = self._backend.version(version.digest)
            start = 0
            for key, file in version.partitions.items():
                if key == partition:
                    break
                start += file.num_samples
            count = version.partitions[partition].num_samples if partition in version.partitions else 0
            index = backend.index_among(sample_id, start, start + count)
            sides.append(({"part": part, "n": index}, {} if index is None else backend.contents(index)))
        if all(side["n"] is None for side, _ in sides):
            raise NoSampleError(f"neither version has sample {sample_id!r} of partition {partition!r}")
        (before, had), (after, has) = sides
        names = dict.fromkeys([*had, *has])
        return {"old": before, "new": after, "states": {name: _state(had.get(name), has.get(name)) for name in names}}


def _state(old: tuple[int, int | None] | None, new: tuple[int, int | None] | None) -> str:
    """What became of a modality: ``same``, ``differs``, ``old``, ``new`` (only there) or ``unknown``."""
    if old is None or new is None:
        return "new" if old is None else "old"
    if old == new and old[1] is None:
        return "unknown"  # of the same size, and without checksums
    return "same" if old == new else "differs"


def _named(version: str) -> str:
    """A name or digest of a version: a path in a request never reaches the file system.

    Raises:
        ConfigError: it is something else.
    """
    if not re.fullmatch(r"[0-9a-z]{1,64}", version):
        raise ConfigError("arguments", "version", f"found {version[:80]!r}, expected newest, previous or a digest")
    return version
