"""Packed files read and written as samples."""
