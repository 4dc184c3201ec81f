"""One partition, from its shards to its record."""
