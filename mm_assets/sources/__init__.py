"""Members of containers: what lies in a shard, where, and its bytes."""
