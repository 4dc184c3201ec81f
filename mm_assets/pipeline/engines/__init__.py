"""Engines run `run_partition` for many partitions: they bound what is in flight, and know nothing of Dagster."""
