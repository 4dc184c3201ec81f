"""The row table: its schema, rows made from a source, content filled in."""
