"""The fixture of the tests of materializing."""

from collections.abc import Iterator

import pytest

from .materialize import Opener


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Opens files that note what is read of them, and closes them after the test."""
    made = Opener()
    yield made
    for source in made.sources.values():
        source.close()
