"""What a viewer looks at: one class for each kind of source, behind one protocol."""

from mm_assets.view.backends.base import Backend, Entry, Page, Picture
from mm_assets.view.backends.choose import open_backend

__all__ = ["Backend", "Entry", "Page", "Picture", "open_backend"]
