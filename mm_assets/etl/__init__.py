"""From tar shards to packed files: pure functions over paths, Arrow tables and one dataset folder. Knows no Dagster."""
