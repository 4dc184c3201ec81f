"""Throughput of reading for training: MULT and MSTR beside other projects' formats and the limits of the machine.

``python -m benchmarks.loading --data DIR`` makes the samples, packs them once in every format, and measures each
candidate in rounds, each measurement in a process of its own. What is compared, and how, is in ``README.md`` here.
"""
