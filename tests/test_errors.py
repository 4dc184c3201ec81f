"""What is not installed names itself, and the command that installs it."""

import importlib.metadata
import io
import pickle
import sys
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import zstandard
from fsspec.registry import _registry
from PIL import Image

import mm_assets
from mm_assets.errors import MissingExtraError, masked_urls
from mm_assets.fields import Audio, AudioField, DepthField, TextField
from mm_assets.filters.sharpness import sharpness
from mm_assets.media.silence import measure_silence
from mm_assets.media.sound import resample
from mm_assets.media.tokenizers import JSONTokenizer
from mm_assets.media.video import probe_video
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import to_pandas
from mm_assets.sources.stream import open_cursor
from mm_assets.storage.files import SourceFile

SOUND = Audio(np.zeros((800, 1), np.int16), 8000)
FLAC = AudioField(encoding="flac").encode(SOUND)
ROWS = MULTIMODAL_SCHEMA.empty_table()
ZSTD = zstandard.ZstdCompressor().compress(bytes(1024))


def packed(folder: Path) -> mm_assets.Dataset:
    with mm_assets.create(str(folder / "x.mult"), {"text": TextField()}) as writer:
        writer.write("a", {"text": "b"})
    return mm_assets.open(str(folder / "x.mult"))


def png() -> memoryview:
    target = io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(target, "PNG")
    return memoryview(target.getvalue())


def depth() -> object:
    return DepthField(encoding="zstd").encode(np.zeros((4, 4), np.float32))


def zstd_shard(folder: Path) -> object:
    (folder / "x.tar.zst").write_bytes(ZSTD)
    with SourceFile(str(folder / "x.tar.zst")) as source:
        return open_cursor(source, "zstd")


FEATURES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("av", "video", lambda _: probe_video(bytes(64))),
    ("soxr", "video", lambda _: resample(np.zeros((10, 1), np.float32), 8000, 16_000)),
    ("tokenizers", "text", lambda _: JSONTokenizer("{}")),
    ("torch", "torch", lambda _: mm_assets.MultimodalCollator({}, return_tensors="pt")),
    ("torch", "torch", lambda folder: mm_assets.MultimodalLoader(packed(folder)).torch()),
    ("pandas", "pandas", lambda _: to_pandas(ROWS)),
    ("pyarrow", "arrow", lambda folder: packed(folder).to_arrow()),
    ("pyarrow", "arrow", lambda folder: packed(folder).filter("true")),
    ("duckdb", "arrow", lambda folder: packed(folder).filter("true")),
    ("cv2", "resize", lambda _: sharpness(png(), min_side=None)),
    ("soundfile", "audio", lambda _: AudioField(encoding="flac").encode(SOUND)),
    ("soundfile", "audio", lambda _: AudioField().decode(*FLAC)),
    ("zstandard", "depth", lambda _: depth()),
    (
        "soundfile",
        "audio",
        lambda _: measure_silence(memoryview(FLAC.data), threshold_dbfs=-60, level="rms", window_seconds=0.01),
    ),
    ("zstandard", "depth", zstd_shard),
    ("s3fs", "s3", lambda _: SourceFile("s3://bucket/key")),
    ("huggingface_hub", "hub", lambda _: SourceFile("hf://datasets/user/name/a.parquet")),
]


def installed(monkeypatch: pytest.MonkeyPatch, name: str | None, extras: list[str]) -> None:
    """As where one wheel with these extras is installed, or none and the source tree is on the path."""

    def metadata(asked: str) -> Message:
        if asked != name:
            raise importlib.metadata.PackageNotFoundError(asked)
        found = Message()
        for extra in extras:
            found["Provides-Extra"] = extra
        return found

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)


@pytest.mark.parametrize(
    ("package", "extra", "use"), FEATURES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_feature_without_its_package_says_how_to_install_it(
    package: str, extra: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each feature that needs an optional package names the package and the reader's extra where that is absent."""
    installed(monkeypatch, "mm-assets-reader", [extra])
    monkeypatch.delitem(_registry, "s3", raising=False)  # where earlier tests left it
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        use(tmp_path)
    assert f"needs {package}, which is not installed" in str(caught.value)
    assert str(caught.value).endswith(f"pip install 'mm-assets-reader[{extra}]'")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "extras", "command"),
    [
        ("mm-assets", ["video"], "pip install 'mm-assets[video]'"),
        ("mm-assets-reader", ["video"], "pip install 'mm-assets-reader[video]'"),
        ("mm-assets", [], "pip install mm-assets"),
        (None, [], "pip install 'mm-assets[video]'"),
    ],
)
def test_the_command_is_for_the_wheel_that_is_installed(
    name: str | None, extras: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command names the wheel that is installed, and its extra where it has one; else it restores a requirement."""
    installed(monkeypatch, name, extras)
    assert str(MissingExtraError("x", "av")).endswith(command)


@pytest.mark.parametrize(
    ("url", "package"), [("gs://b/k", "gcsfs"), ("abfs://b/k", "adlfs"), ("sftp://h/k", "paramiko")]
)
def test_a_storage_that_no_extra_installs_names_its_package(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other protocol of fsspec names the package that it needs."""
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}, which is not installed: pip install {package}$"):
        SourceFile(url)


def test_a_package_that_lacks_another_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is installed and broken, its own error passes."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "soxr", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        resample(np.zeros((10, 1), np.float32), 8000, 16_000)
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@ss@h/x.tar, at byte 3", "https://u:***@h/x.tar, at byte 3"),
        (
            "https://h/x?X-Amz-Credential=AK%2F1&X-Amz-Date=1&X-Amz-Signature=ab: cannot be read",
            "https://h/x?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***: cannot be read",
        ),
        ("az://c/x?sv=2020&sig=ab%2B=&se=2024", "az://c/x?sv=2020&sig=***&se=2024"),
        ("(https://h/x?Key-Pair-Id=K&Signature=Q&token=t)", "(https://h/x?Key-Pair-Id=K&Signature=***&token=***)"),
        ("postgresql+psycopg2://dagster:secret@h:6432/d", "postgresql+psycopg2://dagster:***@h:6432/d"),
        ("abfss://container@account.dfs.core.windows.net/x", None),
        ("s3://b/k.tar and http://h/?part=docs-1&sample_id=3&t=x", None),
        ("signature?sig=1", None),
    ],
)
def test_urls_are_shown_without_secrets(text: str, shown: str | None) -> None:
    """Passwords, signatures, tokens and keys in URLs are masked; the rest of the text stays as it is."""
    assert masked_urls(text) == (text if shown is None else shown)
