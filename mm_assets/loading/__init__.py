"""Batches for training out of datasets: order, plan, threads, collation, resuming."""
