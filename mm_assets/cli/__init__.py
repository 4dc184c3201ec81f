"""The `mm-assets` command."""
