"""Benchmarks of exports and imports against `cp` and the converters of other projects."""
