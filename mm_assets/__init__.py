"""Multimodal tar shards to checked, packed training data, and the packed data read back.

`open` and `create` are the two ways into packed files; the pipeline itself is run by `mm-assets` or Dagster. A star
import leaves `open` out, so that it never replaces the built-in function.
"""

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.dataset import open as open
from mm_assets.dataset.files import tables
from mm_assets.dataset.writer import DatasetWriter, create
from mm_assets.errors import (
    CollateError,
    ConfigError,
    CorruptError,
    EncodeError,
    FormatError,
    LimitError,
    LoaderError,
    MmAssetsError,
    SchemaMismatchError,
    ShardError,
    SourceError,
    TruncatedError,
)
from mm_assets.loading.collate import MultimodalCollator, Ragged
from mm_assets.loading.loader import MultimodalLoader
from mm_assets.loading.mixing import MixedLoader, mix

__version__ = "0.1.0"

__all__ = [
    "CollateError",
    "ConfigError",
    "CorruptError",
    "Dataset",
    "DatasetWriter",
    "EncodeError",
    "FormatError",
    "LimitError",
    "LoaderError",
    "MixedLoader",
    "MmAssetsError",
    "MultimodalCollator",
    "MultimodalLoader",
    "Ragged",
    "SchemaMismatchError",
    "ShardError",
    "SourceError",
    "TruncatedError",
    "__version__",
    "create",
    "mix",
    "tables",
]
