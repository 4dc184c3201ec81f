"""Checks: SQL statements over a partition's tables and over what its packed files' own bytes say."""
