"""Rows to samples: the plan of a dataset and the values that a sample gets."""
