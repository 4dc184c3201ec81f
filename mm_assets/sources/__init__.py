"""Members of containers: what a shard holds, where, and its bytes. Nothing here knows a row.

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
