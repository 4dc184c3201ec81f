"""Files behind URLs: reading ranges, listing, publishing whole files, a bounded cache on disk.

Nothing here knows what is in a file.
"""
