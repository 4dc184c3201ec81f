"""Documents of real forms, receipts and photographs, and the examples of their page."""

import io
import json
import re
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.fields import Document, DocumentField, PageLayout
from mm_assets.media.page_layouts import LayoutMap

from .test_document import LAYOUT, PIXELS, PNG, WORDS


def documents_of(folder: Path) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Image and JSON of each document of the corpus, by key."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(next((folder / "docai").glob("*.tar"))) as shard:
        for member in shard:
            key, _, extension = member.name.partition(".")
            found.setdefault(key, {})[extension] = shard.extractfile(member).read()
    return {key: (members.get("png") or members["jpg"], json.loads(members["json"])) for key, members in found.items()}


def test_forms_and_receipts_round_trip_exactly(shared_data, tmp_path):
    """Each FUNSD form and SROIE receipt, mixed in one file, has its pixels, words, boxes, labels, links and fields."""
    documents = documents_of(shared_data)
    field = DocumentField()
    paths = [tmp_path / "docai.mult", tmp_path / "docai.mstr"]
    for path in paths:
        with mm_assets.create(path, {"document": field}, fsync=False) as writer:
            for key, (image, layout) in documents.items():
                writer.write(key, {"document": field.assemble({"pages": [(0, image)], "layout": layout})})
    checksums = []
    for path in paths:
        with mm_assets.open(path) as found:
            checksums.append([zlib.crc32(found.read_raw([i], ["document"])["document"][0]) for i in range(len(found))])
            for (image, source), sample in zip(documents.values(), found, strict=True):
                check_document(sample["document"], image, source)
        changed = {"document": DocumentField(normalize=True)}
        with mm_assets.open(path, fields=changed) as found:
            for (_, source), sample in zip(documents.values(), found, strict=True):
                check_normalized(sample["document"].layout, source)
    assert checksums[0] == checksums[1]
    assert sum("form" in layout for _, layout in documents.values()) == 30
    assert len(documents) == 42


def test_the_example_of_training_runs(tmp_path, monkeypatch):
    """The Python example of the page opens a packed file and finds what its comments say."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "layouts.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with mm_assets.create("docai.mstr", {"document": DocumentField()}, fsync=False) as writer:
        writer.write("a", {"document": Document([PIXELS], LAYOUT)})
    space: dict[str, Any] = {}
    exec(compile(example, "docs/spec/layouts.md", "exec"), space)
    assert space["image"].shape == (12, 17, 3)
    assert space["words"] == WORDS.texts
    assert space["boxes"].tolist() == [[0, 0, 294, 250], [294, 0, 294, 0], [352, 166, 1000, 1000]]
    assert space["labels"] == ["B-QUESTION", "O", "B-ANSWER"]
    assert space["questions"] == ("question", "answer")
    space["documents"].close()


def check_document(document: Document, image: bytes, source: dict[str, Any]) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(image)))
    np.testing.assert_array_equal(document.pages[0], pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels)
    layout = document.layout
    words, segments = layout.words, layout.segments
    assert layout.page_sizes.tolist() == [[source["width"], source["height"]]]
    if "form" in source:
        form = source["form"]
        listed = [word for entry in form for word in entry["words"]]
        assert words.boxes.tolist() == [word["box"] for word in listed]
        assert list(segments.texts) == [entry["text"] for entry in form]
        assert segments.boxes.tolist() == [entry["box"] for entry in form]
        assert list(segments.labels) == [entry["label"] for entry in form]
        assert layout.word_segments.tolist() == [entry["id"] for entry in form for _ in entry["words"]]
        links = [tuple(link) for entry in form for link in entry["linking"]]
        assert [tuple(link) for link in layout.links.tolist()] == list(dict.fromkeys(links))
        assert layout.fields == {}
    else:
        listed = source["words"]
        assert words.quads.reshape(-1, 8).tolist() == [word["box8"] for word in listed]
        corners = words.quads
        np.testing.assert_array_equal(words.boxes, np.hstack([corners.min(axis=1), corners.max(axis=1)]))
        assert layout.fields == source["labels"]
    assert list(words.texts) == [word["text"] for word in listed]


def check_normalized(layout: PageLayout, source: dict[str, Any]) -> None:
    width, height = source["width"], source["height"]
    if "form" in source:
        boxes = [word["box"] for entry in source["form"] for word in entry["words"]]
    else:
        points = [(word["box8"][0::2], word["box8"][1::2]) for word in source["words"]]
        boxes = [[min(xs), min(ys), max(xs), max(ys)] for xs, ys in points]
    expected = [
        [int(1000 * a / width), int(1000 * b / height), int(1000 * c / width), int(1000 * d / height)]
        for a, b, c, d in boxes
    ]
    assert layout.words.boxes.tolist() == expected


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_phrases_and_regions_of_a_photograph(tmp_path, extension):
    """Caption-to-region data goes through a described layout, with samples that lack regions, and comes back."""
    regions = LayoutMap(words="phrases", text="phrase", box="bbox", box_format="xywh", label=None, fields=("caption",))
    field = DocumentField(layout=regions)
    caption = "a dog beside a red ball"
    source = {
        "caption": caption,
        "phrases": [{"phrase": "a dog", "bbox": [0, 1, 8.5, 9]}, {"phrase": "a red ball", "bbox": [10, 5.25, 7, 6]}],
    }
    samples = [
        {"document": field.assemble({"pages": [(0, PNG)], "layout": source})},
        {"document": None},
        {"document": field.assemble({"pages": [(0, PNG)], "layout": {"phrases": None}})},
    ]
    path = tmp_path / f"regions.{extension}"
    with mm_assets.create(path, {"document": field}, fsync=False) as writer:
        for i, sample in enumerate(samples):
            writer.write(str(i), sample)
    with mm_assets.open(path) as found:
        assert found.fields["document"] == field
        values, present = found.read_batch([0, 1, 2])["document"]
    assert present.tolist() == [True, False, True]
    np.testing.assert_array_equal(values[0].pages[0], PIXELS)
    assert values[0].layout.words.texts == ("a dog", "a red ball")
    assert values[0].layout.words.boxes.tolist() == [[0, 1, 8.5, 10], [10, 5.25, 17, 11.25]]
    assert values[0].layout.fields == {"caption": caption}
    assert values[2] == Document([PIXELS])


def test_an_unknown_layout_is_refused_with_the_known_ones():
    """A wrong name of a layout is a ConfigError that lists the known ones."""
    with pytest.raises(ConfigError, match="auto, funsd, sroie, words"):
        DocumentField(layout="xfund")
