"""Checks: SQL statements that select violations, run by DuckDB over the files of one partition."""
