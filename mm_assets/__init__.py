"""Multimodal shards to checked, packed training data, and the packed data read back.

`open` and `create` are the two ways into packed files; the pipeline itself is run by `mm-assets` or Dagster. A star
import leaves out `open`, so that it never replaces the built-in function, and what training does not need:
`add_stream`, `export`, `from_hf`, `from_parquet` and `from_webdataset`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_assets.dataset.add_stream import add_stream as add_stream
    from mm_assets.dataset.card import DatasetCard, dataset_card
    from mm_assets.dataset.dataset import Dataset
    from mm_assets.dataset.dataset import open as open
    from mm_assets.dataset.files import tables
    from mm_assets.dataset.folder_writer import merge
    from mm_assets.dataset.writer import DatasetWriter, create
    from mm_assets.errors import (
        CollateError,
        ConfigError,
        CorruptError,
        EncodeError,
        FormatError,
        LimitError,
        LoaderError,
        MissingExtraError,
        MmAssetsError,
        SchemaMismatchError,
        ShardError,
        SourceError,
        TruncatedError,
    )
    from mm_assets.exports import export as export
    from mm_assets.fields import register_field
    from mm_assets.formats import convert
    from mm_assets.loading.budget import Budget
    from mm_assets.loading.collate import MultimodalCollator, Ragged
    from mm_assets.loading.loader import LoaderStats, MultimodalLoader
    from mm_assets.loading.mixing import MixedLoader, mix
    from mm_assets.loading.order import Blocks
    from mm_assets.loading.sequence_packer import SequencePacker
    from mm_assets.loading.windows import Window
    from mm_assets.packing.source_samples import from_hf as from_hf
    from mm_assets.packing.source_samples import from_parquet as from_parquet
    from mm_assets.packing.source_samples import from_webdataset as from_webdataset

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "Budget",
    "CollateError",
    "ConfigError",
    "CorruptError",
    "Dataset",
    "DatasetCard",
    "DatasetWriter",
    "EncodeError",
    "FormatError",
    "LimitError",
    "LoaderError",
    "LoaderStats",
    "MissingExtraError",
    "MixedLoader",
    "MmAssetsError",
    "MultimodalCollator",
    "MultimodalLoader",
    "Ragged",
    "SchemaMismatchError",
    "SequencePacker",
    "ShardError",
    "SourceError",
    "TruncatedError",
    "Window",
    "__version__",
    "convert",
    "create",
    "dataset_card",
    "merge",
    "mix",
    "register_field",
    "tables",
]


# Modules are imported when a name is first used: a command imports this package too, and most need none of them.
_NAMES = {
    "dataset.add_stream": ("add_stream",),
    "dataset.card": ("DatasetCard", "dataset_card"),
    "dataset.dataset": ("Dataset", "open"),
    "dataset.files": ("tables",),
    "dataset.folder_writer": ("merge",),
    "dataset.writer": ("DatasetWriter", "create"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "exports": ("export",),
    "fields": ("register_field",),
    "formats": ("convert",),
    "loading.budget": ("Budget",),
    "loading.collate": ("MultimodalCollator", "Ragged"),
    "loading.loader": ("LoaderStats", "MultimodalLoader"),
    "loading.mixing": ("MixedLoader", "mix"),
    "loading.order": ("Blocks",),
    "loading.sequence_packer": ("SequencePacker",),
    "loading.windows": ("Window",),
    "packing.source_samples": ("from_hf", "from_parquet", "from_webdataset"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("dataset", "errors", "fields", "formats", "loading")  # attributes without an import of their own


def __getattr__(name: str) -> Any:
    """Imports the module of a name when it is first used."""
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
