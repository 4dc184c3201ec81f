"""Files at URLs: read by ranges, listed, published whole, cached on disk.

Nothing here interprets file content. Every error of a storage client becomes a `SourceError` that names the URL.
"""

from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile, describe_file
from mm_assets.storage.ranges import RangeSource
from mm_assets.storage.remote import RangeCache, RemoteFile
from mm_assets.storage.store import PublishedFile, Store
from mm_assets.storage.urls import is_local, local_path

__all__ = [
    "PublishedFile",
    "RangeCache",
    "RangeSource",
    "RemoteFile",
    "ShardFile",
    "SourceFile",
    "Store",
    "describe_file",
    "is_local",
    "local_path",
]
