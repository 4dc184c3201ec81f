"""The stages over storage: what a dataset is, what is run, recorded and published."""
