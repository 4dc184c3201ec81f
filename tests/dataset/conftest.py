"""Fixtures of the datasets in shards.py and decoding.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mm_assets
from mm_assets.fields import FIELD_NAMES, FIELD_TYPES

from . import decoding
from .shards import FORMS, write


@pytest.fixture(scope="module", params=FORMS)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def data(paths: list[str]) -> Any:
    with mm_assets.open(paths) as dataset:
        yield dataset


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def packed(tmp_path: Path, form: str) -> Path:
    return decoding.write(
        tmp_path / f"one.{form}", decoding.FIELDS, [decoding.sample(i) for i in range(decoding.COUNT)]
    )


@pytest.fixture
def _registry() -> Iterator[None]:
    types, names = dict(FIELD_TYPES), dict(FIELD_NAMES)
    yield
    for table, before in ((FIELD_TYPES, types), (FIELD_NAMES, names)):
        table.clear()
        table.update(before)
