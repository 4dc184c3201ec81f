"""The stages over storage: what a dataset is, and how it is run, recorded, checked and published. Knows no Dagster."""
