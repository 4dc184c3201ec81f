"""A dataset and its samples as notebooks show them: HTML of `mm_assets.display`, made when a cell is shown."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from mm_assets.dataset.decoding import locate
from mm_assets.dataset.open_files import DatasetIds, OpenFiles
from mm_assets.display import Content, Item, absent_item, content_item, linked, sample_html, thumbnail, value_item
from mm_assets.display.item import unreadable_item
from mm_assets.errors import FormatError, MmAssetsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mm_assets.dataset.codecs import DatasetFields

__all__ = ["ShownSample", "dataset_html", "shown_sample"]

_NUM_SAMPLES = 4  # that the page of a dataset shows
_MAX_COUNTED = 200_000  # samples whose presence is counted for it
_MAX_OPENED = 16  # files that are opened to count it
_THUMBNAIL = 160
_WORDS = 120  # characters of a text in a table's cell


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample as people see it; the last line of a notebook's cell shows it.

    Attributes:
        sample_id: of the sample.
        index: of the sample in its dataset.
        items: one for each modality.
    """

    sample_id: str
    index: int
    items: tuple[Item, ...]

    def __repr__(self) -> str:
        kinds = ", ".join(f"{item.name}: {item.kind}" for item in self.items)
        return f"ShownSample({self.sample_id!r}, index {self.index}, {kinds})"

    def _repr_html_(self) -> str:
        """HTML that stands alone: no script, every text escaped, media within a budget."""
        return f"<div><b>{escape(self.sample_id)}</b> (index {self.index:,})</div>{sample_html(self.items)}"


def _items_of(files: OpenFiles, fields: DatasetFields, index: int, names: Sequence[str]) -> tuple[Item, ...]:
    """The modalities of a sample as items; damage is one item's note, and does not hide the others."""
    reader, local = files.place(index)
    found = []
    for name in names:
        try:
            payload = reader.read_sample(local, [name], verify=files.files.verify)[name]
        except FormatError as error:
            found.append(unreadable_item(name, str(locate(error, name, (reader.part_of(name).path, local)))))
            continue
        if payload is None:
            found.append(absent_item(name))
            continue
        content, field = Content.of(payload.data), fields.known.get(name)
        if field is None:  # of a type that is not known here: its bytes may show what they are
            found.append(content_item(name, content))
        else:
            found.append(value_item(name, field, content, payload.metadata))
    return linked(found)


def shown_sample(files: OpenFiles, fields: DatasetFields, index: int, names: Sequence[str]) -> ShownSample:
    """Some modalities of a sample as people see them; errors as `Dataset.show`."""
    items = _items_of(files, fields, index, names)
    return ShownSample(DatasetIds(files)[index], index, items)


def dataset_html(files: OpenFiles, fields: DatasetFields, path: str) -> str:
    """A dataset as HTML: its modalities with their fields and counts, and its first samples."""
    count = files.num_samples
    cells = [(escape(name), _field_words(fields.known.get(name)), _presence(files, name)) for name in fields.names]
    rows = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells]
    head = f"<div><b>Dataset</b> <code>{escape(path)}</code>, {count:,} samples</div>"
    table = f"<table><tr><th>modality</th><th>field</th><th>present</th></tr>{''.join(rows)}</table>"
    samples = [_card(files, fields, index) for index in range(min(count, _NUM_SAMPLES))]
    cards = f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(samples)}</div>'
    more = f"<code>show(index)</code> shows a sample whole, <code>mm-assets view {escape(path)}</code> all."
    return f'{head}{table}{cards}<div style="opacity:.7;font-size:85%">{more}</div>'


def _field_words(field: object) -> str:
    return "not known here" if field is None else escape(type(field).__name__)


def _presence(files: OpenFiles, name: str) -> str:
    if files.num_samples > _MAX_COUNTED or len(files.files.entries) > _MAX_OPENED:
        return "not counted"
    try:
        return f"{sum(int(reader.presence(name)[local].sum()) for reader, _, local in files.pieces()):,}"
    except MmAssetsError as error:
        return escape(str(error))


def _card(files: OpenFiles, fields: DatasetFields, index: int) -> str:
    style = "border:1px solid #8884;border-radius:6px;padding:6px;width:180px;overflow:hidden"
    try:
        shown = shown_sample(files, fields, index, fields.names)
    except MmAssetsError as error:
        return f'<div style="{style}">{index:,}: {escape(str(error))}</div>'
    parts = [f"<div><b>{escape(shown.sample_id)}</b></div>"]
    picture = next((found for item in shown.items if (found := thumbnail(item, _THUMBNAIL))), None)
    if picture is not None:
        data = base64.b64encode(picture).decode("ascii")
        parts.append(f'<img src="data:image/jpeg;base64,{data}" alt="" style="max-width:100%">')
    text = next((str(item.data["text"]) for item in shown.items if item.kind == "text" and item.data.get("text")), "")
    if text:
        parts.append(f"<div>{escape(text[:_WORDS])}{'…' if len(text) > _WORDS else ''}</div>")
    kinds = ", ".join(f"{item.name}: {item.kind}" for item in shown.items if item.kind != "absent")
    parts.append(f'<div style="opacity:.7;font-size:80%">{escape(kinds)}</div>')
    return f'<div style="{style}">{"".join(parts)}</div>'
