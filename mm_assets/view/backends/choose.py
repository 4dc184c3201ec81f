"""What a location holds, and the backend for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_assets.view.backends.base import Backend

__all__ = ["open_backend"]


def open_backend(locations: Sequence[str], *, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend for what was given to the command.

    Raises:
        MmAssetsError: it cannot be read, or is nothing that can be shown.
    """
    import mm_assets
    from mm_assets.view.backends.packed import PackedBackend

    path = locations[0] if len(locations) == 1 else list(locations)
    return PackedBackend(mm_assets.open(path, storage_options=storage_options), title=", ".join(locations))
