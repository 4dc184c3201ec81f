"""An interleaved sample: lists of texts and image tokens become items at their list positions.

A token is the name of a member, a URL or path, or, in the MINT-1T-PDF layout, the next frame of the sample's one TIFF.
A token that cannot be resolved becomes an item with an error, never another image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mm_assets.rows.schema import MemberRules
from mm_assets.rows.source_ref import is_allowed_reference, is_reference
from mm_assets.sources.member import Member
from mm_assets.sources.samples import Sample, ShardMembers, modality_of

__all__ = ["InterleavedItems", "RowItem", "entries_of", "interleaved_items", "is_interleaved"]

TIFF_EXTENSIONS = ("tif", "tiff")
MAX_SHOWN = 80  # characters of a token that a message repeats


class RowItem(NamedTuple):
    """One row under construction.

    Attributes:
        position: list index.
        modality: "text" or "image".
        number: place among the entries of its list that are not null, from 0.
        text: the text, of text items.
        member: the member that holds the image.
        frame: frame of a multi-frame TIFF.
        url: reference that is read directly.
        error: why the image is missing.
    """

    position: int
    modality: str
    number: int
    text: str | None = None
    member: Member | None = None
    frame: int | None = None
    url: str | None = None
    error: str | None = None


class InterleavedItems(NamedTuple):
    """The items of an interleaved sample's lists.

    Attributes:
        items: by position; where both lists have an entry, the text first.
        problems: (reason, detail) of each entry that became no item.
        num_texts: entries of the text list that are not null.
        num_images: entries of the image list that are not null.
        unequal: both lists are there and differ in length.
    """

    items: list[RowItem]
    problems: list[tuple[str, str]]
    num_texts: int
    num_images: int
    unequal: bool


def is_interleaved(value: Mapping[str, Any], layout: MemberRules) -> bool:
    """Whether a sample's JSON has a list of texts or of images."""
    return isinstance(value.get(layout.texts_field), list) or isinstance(value.get(layout.images_field), list)


def interleaved_items(
    value: Mapping[str, Any], sample: Sample, json_member: Member, shard: ShardMembers, layout: MemberRules
) -> InterleavedItems:
    """The items of an interleaved sample in order; a text in the place of a list is its only entry.

    Args:
        value: the sample's JSON.
        sample: its members.
        json_member: the member that the JSON came from.
        shard: the index of the shard, for tokens that name a member of another key.
        layout: names of the lists, and what references are allowed.
    """
    problems: list[tuple[str, str]] = []
    texts = _list(value, layout.texts_field, problems)
    images = _list(value, layout.images_field, problems)
    image_items = _image_items(images, value, sample, json_member, shard, layout)
    items: list[RowItem] = []
    num_texts = num_images = 0
    for position in range(max(len(texts), len(images))):
        text = texts[position] if position < len(texts) else None
        if isinstance(text, str):
            items.append(RowItem(position, "text", num_texts, text=text))
        elif text is not None:
            detail = f"{layout.texts_field}[{position}] is {type(text).__name__}, expected text or null"
            problems.append(("text_not_a_string", detail))
        num_texts += text is not None
        if position < len(images) and images[position] is not None:
            items.append(image_items[num_images])
            num_images += 1
    unequal = bool(texts and images) and len(texts) != len(images)
    return InterleavedItems(items, problems, num_texts, num_images, unequal)


def entries_of(found: object) -> list[Any] | None:
    """Returns the entries of one of an interleaved sample's lists; a text is its only one. None for anything else."""
    return [found] if isinstance(found, str) and found else found if isinstance(found, list) else None


def _list(value: Mapping[str, Any], key: str, problems: list[tuple[str, str]]) -> Sequence[Any]:
    found = value.get(key)
    entries = entries_of(found)
    if entries is None and found is not None:
        problems.append(("not_a_list", f"{key!r} is {type(found).__name__}, expected a list"))
    return entries or ()


def _token_text(token: object, layout: MemberRules) -> str | None:
    """The text of a token; one that is an object may name its member under `image_member_field`."""
    if isinstance(token, dict) and layout.image_member_field is not None:
        token = token.get(layout.image_member_field)
    return token if isinstance(token, str) else None


def _image_items(
    images: Sequence[Any],
    value: Mapping[str, Any],
    sample: Sample,
    json_member: Member,
    shard: ShardMembers,
    layout: MemberRules,
) -> list[RowItem]:
    tokens = [
        (position, token, _token_text(token, layout)) for position, token in enumerate(images) if token is not None
    ]
    named = [None if text is None else shard.find(text, json_member.member) for _, _, text in tokens]
    frame_name = value.get(layout.image_member_field) if layout.image_member_field is not None else None
    frames_of = shard.find(frame_name, json_member.member) if isinstance(frame_name, str) else None
    by_position = frames_of is None and not any(named)
    missing = ""
    if by_position:
        frames_of, missing = _own_tiff(sample)
    # A TIFF that several tokens name has a frame for each of them.
    tiffs = [m.ordinal for m in named if m is not None and m.extension in TIFF_EXTENSIONS]
    uses: Mapping[int, int] = Counter(tiffs) if tiffs else {}
    frames: dict[int, int] = {}  # of each member so far
    items: list[RowItem] = []
    for number, ((position, token, text), member) in enumerate(zip(tokens, named, strict=True)):
        if member is not None:
            kind = modality_of(member.extension, layout.extensions)
            if kind not in ("image", "binary"):
                error = f"image token {_shown(token)} names member {member.member!r}, which is {kind} and not an image"
                items.append(RowItem(position, "image", number, error=error))
                continue
            before = frames.get(member.ordinal, 0)
            frames[member.ordinal] = before + 1
            shares = member.extension in TIFF_EXTENSIONS and (member is frames_of or uses[member.ordinal] > 1)
            items.append(RowItem(position, "image", number, None, member, before if shares else None))
            continue
        item = RowItem(position, "image", number)
        if text is not None and is_reference(text):
            items.append(_reference(item, text, layout))
        elif frames_of is not None:
            before = frames.get(frames_of.ordinal, 0)
            frames[frames_of.ordinal] = before + 1
            items.append(_frame(item, frames_of, number if by_position else before, token))
        else:
            error = f"image token {_shown(token)} names no member of the shard{missing}"
            items.append(item._replace(error=error))
    return items


def _own_tiff(sample: Sample) -> tuple[Member | None, str]:
    """The one ``<key>.tiff`` or ``<key>.tif`` of a sample, or why it cannot be chosen."""
    tiffs = [m for m in sample.members if not m.role and m.extension in TIFF_EXTENSIONS]
    if len(tiffs) == 1:
        return tiffs[0], ""
    if not tiffs:
        return None, f", and there is no {sample.key}.tiff that it could be a frame of"
    return None, f", and it could be a frame of {' or '.join(m.member for m in tiffs)}"


def _frame(item: RowItem, member: Member, frame: int, token: object) -> RowItem:
    if member.extension in TIFF_EXTENSIONS:
        return item._replace(member=member, frame=frame)
    if frame == 0:
        return item._replace(member=member)
    found = f"{member.member!r}, which is not a TIFF and has one image"
    error = f"image token {_shown(token)} would be frame {frame} of {found}"
    return item._replace(error=error)


def _reference(item: RowItem, token: str, layout: MemberRules) -> RowItem:
    if not layout.allow_references:
        return item._replace(error=f"image token {_shown(token)} is a URL or path, and allow_references is off")
    if is_allowed_reference(token, layout.allowed_references):
        return item._replace(url=token)
    return item._replace(error=f"image token {_shown(token)} points outside allowed_references")


def _shown(token: object) -> str:
    text = ascii(token)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
