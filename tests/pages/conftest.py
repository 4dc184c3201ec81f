"""Fixtures of the pages about filters: tables and images as the tests of filters make them."""

from ..filters.conftest import encode, image, make_table

__all__ = ["encode", "image", "make_table"]
