"""Abstract test suites for people who write a field, a filter, an annotator, a source or a loader of their own.

Subclass one in a test module, give it values, and pytest collects what every field, filter, annotator, source or loader
promises. The package's own tests subclass them too. Needs pytest and Hypothesis: ``pip install 'mm-assets[testing]'``.
"""

from importlib import import_module

from mm_assets.errors import optional_import

with optional_import("hypothesis", "mm_assets.testing"):
    import_module("hypothesis")
with optional_import("pytest", "mm_assets.testing"):
    import pytest

# Before the import of the suites: so a failed assert in them shows its values, as in a test module.
pytest.register_assert_rewrite(*(f"mm_assets.testing.{name}" for name in ("fields", "filters", "loaders", "sources")))

from mm_assets.testing.fields import FieldSuite, damaged, same  # noqa: E402  # see above
from mm_assets.testing.filters import AnnotatorSuite, FilterSuite, make_rows  # noqa: E402  # see above
from mm_assets.testing.loaders import LoaderSuite  # noqa: E402  # see above
from mm_assets.testing.sources import SourceSuite  # noqa: E402  # see above

__all__ = ["AnnotatorSuite", "FieldSuite", "FilterSuite", "LoaderSuite", "SourceSuite", "damaged", "make_rows", "same"]
