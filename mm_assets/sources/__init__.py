"""Members of containers: what a shard holds, where, and its bytes. Nothing here knows a row."""

from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, ShardDamage
from mm_assets.sources.tar import index_shard, iter_members, iter_payloads

__all__ = ["MEMBER_INDEX_SCHEMA", "Member", "ShardDamage", "index_shard", "iter_members", "iter_payloads"]
