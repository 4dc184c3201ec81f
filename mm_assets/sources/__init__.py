"""Members of containers: the entries of a shard, their places and their bytes. Knows no rows.

A format of container is a `Source`: one module, one line in `SOURCES`.
"""

from mm_assets.sources.base import SOURCES, Source, index_members, open_container
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, OnDamage, ShardDamage, named_member, skipped_bytes

__all__ = [
    "MEMBER_INDEX_SCHEMA",
    "SOURCES",
    "Member",
    "OnDamage",
    "ShardDamage",
    "Source",
    "index_members",
    "named_member",
    "open_container",
    "skipped_bytes",
]
