"""The folder of a dataset: its files, records and versions, and what is stale."""
