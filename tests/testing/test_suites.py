"""The suites find what breaks a promise; without pytest they say what to install."""

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mm_assets.fields import BytesField, Encoded, Spans, TextField
from mm_assets.filters import Annotator, Block, Drop, Filter
from mm_assets.rows.schema import UserColumn
from mm_assets.sources import Member
from mm_assets.sources.tar import TarSource
from mm_assets.testing import AnnotatorSuite, FieldSuite, FilterSuite, SourceSuite


@dataclass(frozen=True)
class Padded(BytesField):
    """Breaks promises: another value comes back, `check` takes what `encode` refuses, a fact is not declared."""

    def encode(self, value: Any) -> Encoded:
        if value == b"no":
            raise ValueError("not an EncodeError")
        return super().encode(bytes(value) + b"\0")

    def facts(self, metadata: Any, data: Any) -> Iterable[Any]:
        yield Spans("byte", [0.0], [1.0])


class PaddedSuite(FieldSuite):
    fields = [Padded()]
    cases = [(b"x", b"x")]
    wrong_types = ["text"]
    wrong_shapes = [b"no"]
    bad_configs = []


@pytest.mark.parametrize(
    "name",
    [
        "test_values_come_back",
        "test_wrong_types_are_refused",
        "test_wrong_extents_are_refused",
        "test_facts_are_of_the_declared_kinds",
        "test_it_is_registered",
        "test_bytes_that_are_kept_are_kept",
    ],
)
def test_a_broken_field_is_found(name: str) -> None:
    """Each promise that a field breaks fails a test of its own."""
    with pytest.raises((AssertionError, ValueError, TypeError)):
        getattr(PaddedSuite(), name)()


class Careless(Filter):
    """Names rows that are not there, counts across partitions, and reads bytes that it did not ask for."""

    judged: list[int] = []

    def judge(self, block: Block) -> Iterable[Drop]:
        self.judged.append(block.num_rows)
        yield Drop(block.num_rows, f"block_{len(self.judged)}", None)
        yield from (Drop(int(row), "has_bytes", None) for row in block.rows_of("image") if block.payload(row))


class CarelessSuite(FilterSuite):
    config = {"type": f"{__name__}:Careless"}
    cases = [({"a": [("image", b"1")]}, {})]
    bad_configs = [{"type": f"{__name__}:Padded"}]


@pytest.mark.parametrize(
    "name",
    [
        "test_something_is_kept_and_something_dropped",
        "test_verdicts_are_the_same_each_time",
        "test_any_rows_are_judged",
        "test_bytes_are_read_only_where_declared",
    ],
)
def test_a_broken_filter_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each promise that a filter breaks fails a test of its own."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Careless.__module__])
    with pytest.raises(AssertionError):
        getattr(CarelessSuite(), name)()


class Short(Annotator):
    """Has too few values, of another type, made of bytes that it did not ask for."""

    columns = (UserColumn(name="size", source="", type="int64", rows=""),)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        return {"size": pa.array([len(block.payload(int(row)) or b"") for row in block.rows_of("image")], pa.int32())}


class ShortSuite(AnnotatorSuite):
    config = {"type": f"{__name__}:Short"}
    cases = [({"a": [("text", "t")]}, {"size": [None, 1]})]


@pytest.mark.parametrize("name", ["test_any_rows_are_annotated", "test_bytes_are_read_only_where_declared"])
def test_a_broken_annotator_is_found(name: str) -> None:
    """Each promise that an annotator breaks fails a test of its own."""
    with pytest.raises((AssertionError, TypeError)):
        getattr(ShortSuite(), name)()


class ForgetfulSource(TarSource):
    """Leaves out the last entry, and yields whatever the caller wants."""

    def members(self, **options: Any) -> Iterator[Member]:
        yield from list(super().members(**options))[:-1]

    def payloads(self, *, wanted: Any, **options: Any) -> Iterator[tuple[Member, bytes]]:
        yield from super().payloads(wanted=lambda _: True, **options)


class ForgetfulSuite(SourceSuite):
    source = ForgetfulSource

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w") as archive:
            for name, content in files:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return target.getvalue()


@pytest.mark.parametrize("name", ["test_members_are_the_files_in_order", "test_only_wanted_members_are_yielded"])
def test_a_broken_source_is_found(tmp_path: Path, name: str) -> None:
    """Each promise that a source breaks fails a test of its own, whose message shows the values."""
    with pytest.raises(AssertionError, match="none"):
        getattr(ForgetfulSuite(), name)(tmp_path)


def test_unmet_parameters_are_found() -> None:
    """A class that takes a parameter which its suite calls bad fails, as does one that is not built at all."""

    class Lenient(FilterSuite):
        config = {"type": "text_length", "min_words": 1}
        bad_configs = [{"min_words": 2}]

    with pytest.raises(pytest.fail.Exception):
        Lenient().test_bad_parameters_are_refused()
    with pytest.raises(AssertionError):
        type(
            "NoLimit", (FieldSuite,), {"fields": [TextField()], "maximum": (TextField(), "")}
        )().test_the_limit_is_inclusive()


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_a_missing_package_names_the_extra(package: str) -> None:
    """Without pytest or Hypothesis the import says what to install; the rest of the package needs neither."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import mm_assets, mm_assets.fields, mm_assets.filters\n"
        "try:\n    import mm_assets.testing\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert f"mm_assets.testing needs {package}, which is not installed: pip install" in done.stdout
