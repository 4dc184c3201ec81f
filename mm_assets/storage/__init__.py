"""Files at URLs: read by ranges, listed, published whole, cached on disk.

Nothing here interprets file content. Every error of a storage client becomes a `SourceError` that names the URL.
"""
