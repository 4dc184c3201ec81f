"""Relations between the items of a sample: what lies over what, and what runs on whose clock."""

from __future__ import annotations

from collections.abc import Sequence

from mm_assets.display.item import Item

__all__ = ["linked"]


def linked(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items of one sample, with ``data["over"]``: the name of the item that one belongs on."""
    return tuple(items)
