"""The `mm-assets` command: one module per command. Only the commands that need Dagster import it."""
