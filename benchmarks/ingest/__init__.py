"""What it costs to take shards in: tar to Parquet and packed files, beside the disk's limits and NeMo Curator."""
