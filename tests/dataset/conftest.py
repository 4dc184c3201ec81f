"""Fixtures of the datasets in shards.py."""

from typing import Any

import pytest

import mm_assets

from .shards import FORMS, write


@pytest.fixture(scope="module", params=FORMS)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def data(paths: list[str]) -> Any:
    with mm_assets.open(paths) as dataset:
        yield dataset
