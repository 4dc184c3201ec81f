"""docs/reference against the code; run as a script, this writes the pages again.

The pages have what docstrings and the commands' own help say, so they can be read where the site is not: in the
repository and by a program.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from mm_assets.cli.main import COMMANDS, main

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
HEADS = {"Args": "argument | meaning", "Attributes": "attribute | meaning", "Raises": "error | when"}


@dataclass(frozen=True)
class ApiPage:
    """A page on names of the Python API.

    Attributes:
        title: of the page.
        about: its first paragraph.
        names: by module, what is described; None for all of its public names.
        with_methods: whether the methods of classes are described.
    """

    title: str
    about: str
    names: dict[str, tuple[str, ...] | None]
    with_methods: bool = True


PAGES = {
    "dataset.md": ApiPage(
        title="Python: datasets",
        about="`open`, `create` and `Dataset`: samples in packed files. [Reading](../reading.md), "
        "[writing](../writing.md), [time](../timeline.md), [embeddings](../embeddings.md) and [exports](../exports.md) "
        "have examples.",
        names={
            "mm_assets": (
                "open", "create", "merge", "tables", "dataset_card", "DatasetCard", "Dataset", "DatasetWriter",
            ),
            "mm_assets.dataset": (
                "Batch", "FrameAt", "at_time", "steps", "resample_to", "align_onsets", "note_audio_slices",
            ),
            "mm_assets.exports": ("export", "ExportSummary", "ExportProgress"),
            "mm_assets.packing.source_samples": ("from_hf", "from_parquet", "from_webdataset", "SourceSamples"),
            "mm_assets.dataset.search": ("SearchResult",),
            "mm_assets.dataset.vector_index": ("IndexSummary",),
            "mm_assets.dataset.add_stream": ("add_stream", "add_values", "read_values", "write_stream"),
        },
    ),
    "loading.md": ApiPage(
        title="Python: loading",
        about="Batches for training. [Loading](../loading.md) has examples, and [its rules](../spec/loading.md) all "
        "limits.",
        names={
            "mm_assets": (
                "MultimodalLoader", "Blocks", "Budget", "SequencePacker", "LoaderStats", "MultimodalCollator", "Ragged",
                "mix", "MixedLoader", "Window",
            )
        },
    ),
    "values.md": ApiPage(
        title="Python: values",
        about="The values that fields encode and decode. [Fields](../spec/fields.md) specifies their bytes.",
        names={
            "mm_assets.fields": (
                "Audio", "VideoAudio", "VideoFile", "Clip", "TimeSeries", "TimedSegment", "segments_at",
                "segments_between", "MIDI", "NoteTable", "Document", "TextBoxes", "Boxes", "ImageText",
                "ImageTextPair", "RawJSON",
            ),
            "mm_assets.media.midi": ("parse_midi", "MIDIFile", "Beats", "TempoMap"),
        },
    ),
    "fields.md": ApiPage(
        title="Python: fields",
        about="A field encodes and decodes the values of a modality. [Fields](../spec/fields.md) specifies settings "
        "and bytes.",
        names={
            "mm_assets.fields": (
                "BytesField", "TextField", "JSONField", "NDArrayField", "ScalarField", "ImageField", "DepthField",
                "TokensField", "TimedTextField", "AudioField", "MIDIField", "TimeSeriesField", "SyncedVideoAudioField",
                "ImageTextPairField", "DocumentField", "SequenceField",
            ),
        },
        with_methods=False,
    ),
    "extending.md": ApiPage(
        title="Python: your own filters, fields and sources",
        about="Base classes and protocols of your own classes, and the tests that they should pass. "
        "[Filters](../filters.md#your-own), [fields](../how-to/own-field.md) and "
        "[sources](../spec/sources.md#your-own-source) have examples.",
        names={
            "mm_assets.filters": ("Filter", "MeasuredRowFilter", "Annotator", "Block", "Drop"),
            "mm_assets.fields": ("Field", "Encoded", "register_field"),
            "mm_assets.sources": ("Source", "Member"),
            "mm_assets.testing": ("FieldSuite", "FilterSuite", "AnnotatorSuite", "LoaderSuite", "SourceSuite"),
        },
    ),
    "formats.md": ApiPage(
        title="Python: containers",
        about="Readers and writers of MULT and MSTR with opaque payloads. [Format](../spec/format.md) specifies "
        "the bytes.",
        names={
            "mm_assets.formats": (
                "open_reader", "MultReader", "MultWriter", "MstrReader", "MstrWriter", "ModalitySpec", "Payload",
                "WriteSummary", "VerifyReport", "convert",
            ),
        },
    ),
    "errors.md": ApiPage(
        title="Python: errors",
        about="Every exception that the package defines. [Troubleshooting](../how-to/troubleshooting.md) lists "
        "messages and what to do about them.",
        names={"mm_assets.errors": None},
        with_methods=False,
    ),
}  # fmt: skip


# --- docstrings -------------------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Text of a docstring as Markdown."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text)


def entries(text: str) -> Iterator[tuple[str, str]]:
    """The name and description of each entry of a section."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, _, said = entry.partition(":")
        yield name.strip("*"), " ".join(said.split())


def described(doc: str) -> Iterator[str]:
    """A docstring as paragraphs and tables."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", doc, flags=re.MULTILINE)
    yield prose(parts[0].strip())
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inner = re.match(r"(?:[ \t]+\S.*\n?|\s*\n)*", body)
        assert inner is not None
        text, rest = textwrap.dedent(inner[0]).strip(), body[inner.end() :].strip()
        if title in ("Returns", "Yields"):
            yield f"**{title}** {prose(' '.join(text.split()))}"
        else:
            rows = [f"| `{name}` | {prose(said).replace('|', chr(92) + '|')} |" for name, said in entries(text)]
            yield "\n".join([f"| {HEADS[title]} |", "| --- | --- |", *rows])
        if rest:
            yield prose(rest)


class _Words:
    """An annotation or a default as its text, which `inspect` would put into quotes."""

    def __init__(self, text: object) -> None:
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def parameter(given: inspect.Parameter) -> inspect.Parameter:
    """A parameter that is printed as it is written."""
    if given.annotation is not inspect.Parameter.empty:
        given = given.replace(annotation=_Words(given.annotation))
    if given.default is not given.empty and repr(given.default).startswith(
        "<"
    ):  # the factory of a dataclass, or a class
        given = given.replace(default=_Words("…"))
    return given


def signature(name: str, thing: Any) -> str:
    """The call of something as a code block."""
    found = inspect.signature(thing)
    given = [parameter(p) for p in found.parameters.values() if p.name not in ("self", "cls")]
    result = found.return_annotation
    ends = ")" if result is inspect.Signature.empty or inspect.isclass(thing) else f") -> {_Words(result)}"
    parts: list[str] = []
    for p in given:
        if p.kind is p.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(str(p))
    line = f"{name}({', '.join(parts)}{ends}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ends
    return f"```python\n{line}\n```"


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that have a docstring, its own before inherited ones."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("mm_assets"):
            continue
        for name, value in vars(base).items():
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            is_one = inspect.isfunction(plain) or isinstance(plain, property)
            if name not in seen and not name.startswith(("_", "test_")) and is_one and inspect.getdoc(plain):
                seen.add(name)
                yield name, plain


def api(file: str) -> str:
    """A page on the Python API."""
    page = PAGES[file]
    parts = [f"# {page.title}", page.about, "<!-- Made by tests/pages/test_reference.py from the docstrings. -->"]
    for module, names in page.names.items():
        found = import_module(module)
        parts.append(f"## `{module}`")
        for name in names or sorted(found.__all__):
            thing = getattr(found, name)
            doc = inspect.getdoc(thing)
            assert doc, name
            parts.append(f"### `{name}`")
            if inspect.isclass(thing) and (issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)):
                bases = [base.__name__ for base in thing.__bases__]
                parts.append(f"```python\nclass {name}({', '.join(bases)})\n```")
            else:
                parts.append(signature(name, thing))
            parts += described(doc)
            if page.with_methods and inspect.isclass(thing):
                for inner, method in methods(thing):
                    parts.append(f"#### `{name}.{inner}`")
                    if not isinstance(method, property):
                        parts.append(signature(inner, method))
                    parts += described(inspect.getdoc(method) or "")
    return "\n\n".join(parts) + "\n"


# --- commands ---------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def command_line() -> str:
    """The page on the commands."""
    parts = [
        "# Command line",
        "`mm-assets COMMAND --help` prints the same. Results go to standard output, everything else to standard error. "
        "The exit code is 0 for success, 1 if an operation failed or a file is damaged, and 2 for wrong usage. "
        "[Running](../running.md) has examples.",
        "<!-- Made by tests/pages/test_reference.py from the commands. -->",
    ]
    group = click.Context(main, info_name="mm-assets", **main.context_settings)
    for name in COMMANDS:
        command = main.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## `mm-assets {name}`", f"```text\nmm-assets {name} {usage}\n```"]
        parts += [
            prose(" ".join(paragraph.split())) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")
        ]
        rows = ["| option | meaning |", "| --- | --- |"]
        for option in command.get_params(context):
            record = option.get_help_record(context)
            if record is not None and isinstance(option, click.Option) and "--help" not in option.opts:
                names = " ".join(record[0].split()).replace("|", ", ")  # a table has no place for it
                rows.append(f"| `{names}` | {cell(record[1])} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Every page by its file."""
    return {**{file: api(file) for file in PAGES}, "cli.md": command_line()}


@pytest.mark.parametrize("file", [*PAGES, "cli.md"])
def test_the_page_is_that_of_the_code(file: str) -> None:
    """The page is what `python tests/pages/test_reference.py` writes."""
    made = command_line() if file == "cli.md" else api(file)
    assert (FOLDER / file).read_text(encoding="utf-8") == made


def test_every_page_is_written() -> None:
    """The folder has no page that nothing writes."""
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "cli.md"}


def test_the_public_names_are_described() -> None:
    """Each name that a user imports from `mm_assets`, and each field and error, is on a page."""
    described = {
        (module, name) for page in PAGES.values() for module, names in page.names.items() for name in names or ()
    }
    names = {name for _, name in described} | set(import_module("mm_assets.errors").__all__)
    package = import_module("mm_assets")
    assert set(package.__all__) - names == {"__version__"}
    fields = {cls.__name__ for cls in import_module("mm_assets.fields").FIELD_TYPES.values()}
    assert fields - names == set()


if __name__ == "__main__":
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
