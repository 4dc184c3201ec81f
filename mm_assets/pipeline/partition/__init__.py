"""One partition, from its shards to its marker."""
