"""A local web page over anything the project reads: packed files, a dataset's folder, shards before they are packed.

`open_backend` finds out what a location holds, `build_app` makes the application over it, `build_datasets_app` that
over several datasets, and `serve` runs it. Nothing that a request says reaches the file system: a request names
positions in what was opened.
"""

from mm_assets.view.app import build_app
from mm_assets.view.backends import Backend, Entry, Page, open_backend
from mm_assets.view.datasets import build_datasets_app
from mm_assets.view.server import serve

__all__ = ["Backend", "Entry", "Page", "build_app", "build_datasets_app", "open_backend", "serve"]
