"""Many partitions, run by an engine."""
