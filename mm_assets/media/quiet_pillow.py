"""Pillow without its warnings on stderr: what is wrong with an image is said by an error, or does not matter."""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["quiet_pillow"]


@functools.cache
def _silence_libtiff() -> None:
    """Turn off the lines that Pillow's own libtiff prints to stderr for damaged files; Pillow raises all the same."""
    from PIL import _imaging

    try:
        library = ctypes.CDLL(_imaging.__file__)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            getattr(library, name)(None)
    except (OSError, AttributeError):
        return  # linked in another way: its lines cannot be reached


class _Decoding(threading.local):
    """Whether this thread is inside `quiet_pillow`."""

    depth = 0

    def match(self, module: str) -> bool:
        """As a module pattern of a warnings filter."""
        return self.depth > 0 and module.startswith(("PIL.", "pillow_", "mm_assets."))


_DECODING = _Decoding()
_FILTER: Any = ("ignore", None, Warning, _DECODING, 0)


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Ignore Pillow's warnings in this thread, and turn libtiff's lines off.

    `warnings.catch_warnings` replaces the filters of all threads, and two that overlap leave them wrong. Here is one
    more filter, once, that applies only to the threads in this context.
    """
    _silence_libtiff()
    filters: Any = warnings.filters
    if not filters or filters[0] != _FILTER:  # another was set since
        with suppress(ValueError):
            filters.remove(_FILTER)
        filters.insert(0, _FILTER)
    _DECODING.depth += 1
    try:
        yield
    finally:
        _DECODING.depth -= 1
