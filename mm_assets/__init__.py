"""Multimodal tar shards to checked, packed training data, and the packed data read back.

`open` and `create` are the two ways into packed files; the pipeline itself is run by `mm-assets` or Dagster.
"""

from mm_assets.dataset import Dataset, DatasetWriter, create, open
from mm_assets.errors import (
    ConfigError,
    CorruptError,
    EncodeError,
    FormatError,
    MmAssetsError,
    SchemaMismatchError,
    ShardError,
    SourceError,
    TruncatedError,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CorruptError",
    "Dataset",
    "DatasetWriter",
    "EncodeError",
    "FormatError",
    "MmAssetsError",
    "SchemaMismatchError",
    "ShardError",
    "SourceError",
    "TruncatedError",
    "__version__",
    "create",
    "open",
]
