"""What people see of any value: payloads of fields, members of containers, columns of tables.

Bytes in, items out: an `Item` has facts for people, bounded JSON, and `Media` that are read by range or made on demand.
Nothing here serves a request or trusts what it reads: undecodable content gives an item that says why. A field
describes how it is shown (`Field.shown`), so that your own registered field is shown too.
"""

from __future__ import annotations

from mm_assets.display.content import content_item
from mm_assets.display.html import sample_html
from mm_assets.display.item import KINDS, MAX_DATA, Content, Item, Media, absent_item
from mm_assets.display.links import linked
from mm_assets.display.thumbnails import thumbnail
from mm_assets.display.values import column_item, value_item

__all__ = [
    "KINDS",
    "MAX_DATA",
    "Content",
    "Item",
    "Media",
    "absent_item",
    "column_item",
    "content_item",
    "linked",
    "sample_html",
    "thumbnail",
    "value_item",
]
