"""Resources: primitive configuration in, a plain library object out."""

from typing import Any

import dagster as dg

from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

__all__ = ["StorageRoot", "open_dataset", "resource_key"]


def resource_key(spec: DatasetSpec) -> str:
    """Key of the dataset's storage resource."""
    return f"{spec.name}_storage"


class StorageRoot(dg.ConfigurableResource):  # type: ignore[type-arg]  # generic in its own plain object only for IO managers
    """Where a dataset's files go.

    Attributes:
        root: folder or fsspec URL; the dataset's own folder is made below it. Empty takes the declaration's root.
    """

    root: str = ""

    def open(self, spec: DatasetSpec) -> DatasetStore:
        """The dataset's folder below this root."""
        return DatasetStore(spec.replace(root=self.root) if self.root else spec)


def open_dataset(context: Any, spec: DatasetSpec) -> DatasetStore:
    """The dataset's folder, by the storage resource of an asset's, a sensor's or a schedule's context."""
    storage: StorageRoot = getattr(context.resources, resource_key(spec))
    return storage.open(spec)
