"""Exports and what they are packed from again, beside `cp` and the converters of other projects."""
