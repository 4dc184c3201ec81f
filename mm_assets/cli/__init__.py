"""The `mm-assets` command: one module per command. Dagster is imported by the commands that need it."""
