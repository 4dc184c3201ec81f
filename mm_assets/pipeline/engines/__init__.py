"""Engines run partitions, each once: processes of this host, or tasks of a Ray cluster. They do not know Dagster."""
