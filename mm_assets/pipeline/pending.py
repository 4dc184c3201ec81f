"""Which partitions are not up to date, and why: their markers compared with what is registered and declared now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_assets.pipeline.chain import PACKED_FOLDER, PACKED_STAGES, PUBLISHED
from mm_assets.pipeline.store import MARKER_VERSION, DatasetStore, size_fault

__all__ = ["Present", "pending_partitions", "pending_reasons"]


class Present:
    """The current state of the dataset, which markers are compared with."""

    def __init__(self, dataset: DatasetStore) -> None:
        self.partitions = dataset.partitions()
        self.config = PUBLISHED.digest(dataset.spec)
        self.schema = dataset.schema().digest
        self.packed = dataset.store.sizes(PACKED_FOLDER)

    def fault(self, key: str, marker: Mapping[str, Any] | None) -> str | None:
        """Why a partition is not up to date, or None."""
        partition = self.partitions.get(key)
        if partition is None:
            return "its shards are gone"
        if marker is None:
            return "it is not published"
        if marker.get("version") != MARKER_VERSION:
            return "it was published by another version of mm-assets"
        if marker.get("shards") != partition.fingerprints:
            return "its shards changed"
        if marker.get("config_digest") != self.config:
            return "it was made with another configuration"
        if marker.get("schema_digest") != self.schema:
            return "it was made with another dataset schema"
        for form in PACKED_STAGES:
            file = marker["files"][form]
            if fault := size_fault(file["size"], self.packed.get(file["path"])):
                return f"{file['path']} {fault}"
        return None


def pending_partitions(dataset: DatasetStore) -> list[str]:
    """Registered partitions without an up-to-date marker and its packed files, sorted."""
    return list(pending_reasons(dataset))


def pending_reasons(dataset: DatasetStore) -> dict[str, str]:
    """Why each of the `pending_partitions` is one."""
    if not dataset.partitions():
        return {}
    present, markers = Present(dataset), dataset.markers()
    faults = ((key, present.fault(key, markers.get(key))) for key in sorted(present.partitions))
    return {key: fault for key, fault in faults if fault}
