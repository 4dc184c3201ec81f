"""Sequences of a fixed number of tokens, packed with the tokens of several samples.

Which samples go into a sequence is planned from metadata: token counts of records, never of decoded values. The samples
are decoded when their batch is made, and a sample whose tokens contradict its metadata is an error.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.errors import CollateError, ConfigError
from mm_assets.fields import ArraySpec, Field
from mm_assets.fields.parts import split_name
from mm_assets.fields.records import record_entries, take_entry
from mm_assets.loading.budget import read_column
from mm_assets.loading.collate import Ragged, as_tensors
from mm_assets.loading.plan import Step, split_at
from mm_assets.loading.rules import check_integer
from mm_assets.summaries import describe

__all__ = ["PackedGrouping", "SequencePacker", "best_fit", "cut_sample"]

RESERVED = ("input_ids", "segment_ids", "position_ids", "cu_seqlens", "max_seqlen", "index", "start", "valid")

SPLITS = ("no", "anywhere", "between_images")

Piece: TypeAlias = npt.ArrayLike | tuple[str, Any]
"""Some tokens, (n,) integers; or the name of an image modality, and an image."""

PART = np.dtype([("row", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("num_tokens", "<i8")])
"""A part of a sample: the sequence that it is in, its first token in the sample, the one after its last, and how many
tokens the sample has."""

Int64s = npt.NDArray[np.int64]


class SequencePacker:
    """Packs the tokens of samples into sequences of one length; the `collator` of a `MultimodalLoader`.

    The loader's `batch_size` then counts sequences. A batch is a dict with, for B sequences of n parts together,

    ``input_ids``: (B, length) int64, ``pad_id`` after the last part of a sequence;
    ``segment_ids``: (B, length) int32, 1, 2, ... by part, 0 for padding;
    ``position_ids``: (B, length) int64, counted from 0 in each part;
    ``cu_seqlens``: (m + 1,) int32, where each part and each padding begins among the B · length tokens of the batch,
    and their end, as FlashAttention takes it; ``max_seqlen``: the longest of them;
    ``index``: (n,) int64, the sample of each part, and ``start``: (n,) int64, the part's first token in its sample;
    ``valid``: (n,) bool, False for a part that repeats another, to even out ranks or to replace a damaged sample;
    and for each name of `images` a `Ragged` of the images of each sequence, in order: `values` (k, height, width,
    channels), in the dtype of the field or of a transform, and `offsets` (B + 1,) int64.

    A batch raises `CollateError` if the pieces of a sample are not tokens or images, have another number of tokens than
    its metadata says, or if images of a modality have different shapes.

    Args:
        length: tokens of a sequence, from 1.
        pieces: returns what a sample, a dict of values by modality, has in reading order: arrays of token ids, and a
            pair of a modality of `images` and an image for each of its places. By default single images, then single
            arrays of tokens, then the items of sequences by position.
        tokens: columns of the samples' metadata that count their tokens, such as ``input_ids.num_tokens``,
            ``pair.tokens.num_tokens`` of pairs of image and text, or ``text.num_code_points`` if `pieces` makes a token
            of each character, or ``size_text`` of each byte. Of a modality of sequences the counts of its items are
            added up. By default ``num_tokens`` of each modality that has it and is read.
        images: tokens that an image of a modality takes, by the modality's name: from 1 to `length`.
        split: where a sample of more than `length` tokens is divided: ``"anywhere"`` but within an image;
            ``"between_images"``, before images, and elsewhere only in text that is longer than a sequence; ``"no"``: it
            is truncated, without an image that would not be whole, and a loader warns of it once.
        bucket: parts that are packed together, from 1; more of them make less padding.
        bos_id: a token before each sample, or None.
        eos_id: a token after each sample, or None.
        pad_id: fills the end of a sequence; any integer of 64 bits.
        image_id: fills the places of images; any integer of 64 bits.
        return_tensors: ``np``, or ``pt`` for torch tensors over the same memory.

    Raises:
        ConfigError: an argument is wrong. A loader raises it too, if a column of `tokens` or a modality of `images`
            does not exist or is not read.
        MissingExtraError: ``pt``, and torch is not installed.
    """

    def __init__(
        self,
        length: int,
        pieces: Callable[[Mapping[str, Any]], Iterable[Piece]] | None = None,
        *,
        tokens: Sequence[str] | None = None,
        images: Mapping[str, int] | None = None,
        split: str = "no",
        bucket: int = 16_384,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int = 0,
        image_id: int = -1,
        return_tensors: str = "np",
    ) -> None:
        check_integer("length", length, 1)
        check_integer("bucket", bucket, 1)
        if pieces is not None and not callable(pieces):
            raise ConfigError("arguments", "pieces", f"found {describe(pieces)}, expected a function of a sample")
        if isinstance(tokens, str):
            raise ConfigError("arguments", "tokens", f"found {tokens!r}, expected a list of columns")
        for name, count in (images or {}).items():
            check_integer(f"images.{name}", count, 1)
            if name in RESERVED:
                raise ConfigError("arguments", f"images.{name}", "is a name that every batch of sequences has")
            if count > length:
                raise ConfigError(
                    "arguments", f"images.{name}", f"found {count}, expected at most the length, {length}"
                )
        for name, value, allowed in (("split", split, SPLITS), ("return_tensors", return_tensors, ("np", "pt"))):
            if value not in allowed:
                raise ConfigError("arguments", name, f"found {value!r}, expected one of {', '.join(allowed)}")
        for name, number in (("bos_id", bos_id), ("eos_id", eos_id), ("pad_id", pad_id), ("image_id", image_id)):
            if number is None and name in ("bos_id", "eos_id"):
                continue
            is_integer = hasattr(number, "__index__") and not isinstance(number, bool)
            if number is None or not is_integer or not -(2**63) <= number < 2**63:
                raise ConfigError("arguments", name, f"found {number!r}, expected an integer of 64 bits")
        if return_tensors == "pt":
            as_tensors({})  # imports torch
        self.length = length
        self.pieces = pieces
        self.tokens = None if tokens is None else tuple(tokens)
        self.images = dict(images or {})
        self.split = split
        self.bucket = bucket
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.image_id = image_id
        self.return_tensors = return_tensors

    def choose_modalities(self, reader: Any) -> tuple[str, ...] | None:
        """The modalities of a dataset whose values the packer needs; None if it depends on `pieces`."""
        if self.pieces is not None:
            return None
        return tuple(dict.fromkeys([*self.images, *_names_of_tokens(reader, reader.names)]))

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Refuses to collate without a plan.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("arguments", "collator", "a SequencePacker plans whole epochs: give it to a MultimodalLoader")


class PackedGrouping:
    """The sequences of a packer over a dataset, and the batches of them; see `Grouping`.

    An entry is a part of a sample: 32 bytes each.

    Args:
        packer: the settings.
        reader: the dataset.
        names: modalities that are read.

    Raises:
        ConfigError: columns or modalities do not exist.
        FormatError: a file is damaged.
    """

    def __init__(self, packer: SequencePacker, reader: Any, names: Sequence[str]) -> None:
        self._packer = packer
        self._sources = _sources(packer, reader, names)
        self._empty = {source.name: source.empty_images for source in self._sources if source.size}
        self.bucket = packer.bucket
        self.settings: Any = {
            "length": packer.length,
            "tokens": [source.column for source in self._sources if not source.size],
            "images": packer.images,
            "split": packer.split,
            "bucket": packer.bucket,
            "ends": [packer.bos_id is not None, packer.eos_id is not None],
        }
        counts = sum((source.count(reader) for source in self._sources), np.zeros(len(reader), np.int64))
        counts[counts > 0] += sum(self.settings["ends"])
        self._num_tokens = counts
        self._samples, self._starts, self._stops = self._cut(reader)

    def __len__(self) -> int:
        """Parts."""
        return len(self._samples)

    # --- planning -----------------------------------------------------------------------------------------------------

    def cut(self, entries: Int64s) -> list[Int64s]:
        """The parts of each sequence, in the order of the epoch."""
        bins, count = best_fit(self._stops[entries] - self._starts[entries], self._packer.length)
        order = np.argsort(bins, kind="stable")
        bounds = np.searchsorted(bins[order], np.arange(count + 1))
        return split_at(entries[order], bounds.tolist())

    def count(self, entries: Int64s) -> int:
        """How many sequences the parts of a bucket are packed into."""
        return best_fit(self._stops[entries] - self._starts[entries], self._packer.length)[1]

    def rows(self, groups: Sequence[Int64s]) -> tuple[Int64s, npt.NDArray[np.void]]:
        """The samples of some sequences, and which parts of them."""
        entries = np.concatenate(groups)
        samples = self._samples[entries]
        parts = np.empty(len(entries), PART)
        parts["row"] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        parts["start"], parts["stop"] = self._starts[entries], self._stops[entries]
        parts["num_tokens"] = self._num_tokens[samples]
        return samples, parts

    def may_replace(self, entries: Int64s, step: Step) -> npt.NDArray[np.bool_]:
        """Any parts: they are truncated to what they replace."""
        return np.ones(len(entries), np.bool_)

    def _cut(self, reader: Any) -> tuple[Int64s, Int64s, Int64s]:
        """The parts of all samples: sample, first token, and the one after the last; none if it has no tokens."""
        length, split, counts = self._packer.length, self._packer.split, self._num_tokens
        is_long = counts > length
        num_parts = (counts > 0).astype(np.int64)
        if split != "no":
            num_parts[is_long] = -(-counts[is_long] // length)
        samples = np.repeat(np.arange(len(counts)), num_parts)
        starts = (np.arange(len(samples)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * length
        stops = np.minimum(starts + length, counts[samples])
        if split != "no" and self._packer.images and is_long.any():
            keep = ~is_long[samples]
            parts = np.array(list(self._cut_at_images(reader, np.flatnonzero(is_long))), np.int64).T
            samples, starts, stops = np.concatenate([np.stack([samples, starts, stops])[:, keep], parts], axis=1)
            order = np.argsort(samples, kind="stable")  # neighbors in the dataset stay neighbors
            samples, starts, stops = samples[order], starts[order], stops[order]
        num_lost = int(counts.sum() - (stops - starts).sum())
        if num_lost:
            longest = int(counts.argmax())
            message = (
                f"{num_lost:,} of {int(counts.sum()):,} tokens are truncated: {int(is_long.sum()):,} samples are "
                f"longer than {length:,}, such as sample {longest} with {int(counts[longest]):,}, and split is 'no'"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        return samples, starts, stops

    def _cut_at_images(self, reader: Any, indices: Int64s) -> Iterator[tuple[int, int, int]]:
        """The parts of some samples, which are divided at their images or around them."""
        packer = self._packer
        tables = [source.items(reader, indices) for source in self._sources]
        for index, *parts in zip(indices.tolist(), *tables, strict=True):
            items = [
                (position, source.size, count)
                for source, part in zip(self._sources, parts, strict=True)
                for position, count in part
            ]
            items.sort(key=lambda item: item[0])
            stops = accumulate((count for _, _, count in items), initial=int(packer.bos_id is not None))
            places = [start for start, (_, size, _) in zip(stops, items, strict=False) if size]
            sizes = [size for _, size, _ in items if size]
            between = packer.split == "between_images"
            for part in cut_sample(int(self._num_tokens[index]), places, sizes, packer.length, between_images=between):
                yield index, *part

    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(
        self,
        samples: Sequence[Mapping[str, Any]],
        *,
        parts: npt.NDArray[np.void],
        index: Int64s,
        valid: npt.NDArray[np.bool_],
    ) -> dict[str, Any]:
        """Makes a batch of one part of each sample; see `SequencePacker`.

        Raises:
            CollateError: the tokens of a sample are not as its metadata says.
        """
        packer, num_rows = self._packer, int(parts["row"][-1]) + 1
        input_ids = np.full((num_rows, packer.length), packer.pad_id, np.int64)
        segment_ids = np.zeros((num_rows, packer.length), np.int32)
        position_ids = np.zeros((num_rows, packer.length), np.int64)
        ends, segments = [0] * num_rows, [0] * num_rows
        bounds = [row * packer.length for row in range(num_rows + 1)]
        images: dict[str, list[Any]] = {name: [] for name in packer.images}
        num_images = {name: np.zeros(num_rows + 1, np.int64) for name in packer.images}
        for number, (row, start, stop, num_tokens) in enumerate(parts.tolist()):
            begin = ends[row]
            where = f"sample {index[number]}"
            for name, value, low, high in _within(self._pieces(samples[number], num_tokens, where), start, stop, where):
                place = slice(begin + low - start, begin + high - start)
                input_ids[row, place] = value if name is None else packer.image_id
                ends[row] = place.stop
                if name is not None:
                    images[name].append(value)
                    num_images[name][row + 1] += 1
            segments[row] += 1
            segment_ids[row, begin : ends[row]] = segments[row]
            position_ids[row, begin : ends[row]] = np.arange(ends[row] - begin)
            bounds.append(row * packer.length + ends[row])
        cu_seqlens = np.unique(np.array(bounds, np.int32))
        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "segment_ids": segment_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": int(np.diff(cu_seqlens).max()),
            "index": index,
            "start": parts["start"].copy(),
            "valid": valid,
        }
        for name, values in images.items():
            batch[name] = Ragged(_stacked(name, values, self._empty[name]), np.cumsum(num_images[name]))
        return as_tensors(batch) if packer.return_tensors == "pt" else batch

    def _pieces(self, sample: Mapping[str, Any], num_tokens: int, where: str) -> list[_Piece]:
        """The pieces of a sample that should have some number of tokens together; `where` is for messages."""
        packer = self._packer
        pieces = _default_pieces(self._sources, sample) if packer.pieces is None else packer.pieces(sample)
        if packer.bos_id is not None:
            pieces = [[packer.bos_id], *pieces]
        if packer.eos_id is not None:
            pieces = [*pieces, [packer.eos_id]]
        parsed = [self._parse(piece, where) for piece in pieces]
        if (found := sum(piece.num_tokens for piece in parsed)) != num_tokens:
            columns = ", ".join([*self.settings["tokens"], *packer.images])
            detail = f"{where}: found pieces of {found} tokens, expected {num_tokens} as in the metadata of {columns}"
            raise CollateError("input_ids", detail)
        return parsed

    def _parse(self, piece: Piece, where: str) -> _Piece:
        sizes = self._packer.images
        if isinstance(piece, tuple) and len(piece) == 2 and isinstance(piece[0], str):
            if piece[0] not in sizes:
                expected = f"tokens or an image of {', '.join(sizes)}"
                raise CollateError("input_ids", f"{where}: found a piece {piece[0]!r}, expected {expected}")
            return _Piece(*piece, sizes[piece[0]])
        tokens = np.asarray(piece)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            expected = "integers in one axis, or a pair of name and image"
            raise CollateError("input_ids", f"{where}: found a piece {describe(piece)}, expected {expected}")
        return _Piece(None, tokens, len(tokens))


class _Piece(NamedTuple):
    """Tokens of a sample, or an image and the name of its modality."""

    name: str | None
    value: Any
    num_tokens: int


def _within(pieces: Iterable[_Piece], start: int, stop: int, where: str) -> Iterator[tuple[str | None, Any, int, int]]:
    """What a part of a sample has of its pieces: name, tokens or image, and its first and last tokens in the sample.

    An image that does not end within the part is left out.
    """
    offset = 0
    for name, value, num_tokens in pieces:
        end = offset + num_tokens
        low, high = max(start, offset), min(stop, end)
        if low < high and name is None:
            yield None, value[low - offset : high - offset], low, high
        elif low < high and low > offset:
            detail = f"{where}: an image has tokens {offset} to {end}, but the sample is divided at {start}"
            advice = "pieces must be in the order of positions, single images first"
            raise CollateError("input_ids", f"{detail}: {advice}")
        elif low < high == end:
            yield name, value, low, high
        offset = end


# --- tokens of a dataset ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A modality that has tokens.

    Attributes:
        name: of the modality.
        field: of its values.
        entry: keys that lead to it in the metadata record of a value or, in sequences, of an item; () for images.
        column: as the user names it.
        size: tokens that each image takes; 0 if it has token ids.
    """

    name: str
    field: Field
    entry: tuple[str, ...] = ()
    column: str = ""
    size: int = 0

    @property
    def empty_images(self) -> npt.NDArray[Any]:
        """An array of no images."""
        layout = (self.field.item_field or self.field).value_layout
        return np.zeros((0, *layout.shape), layout.dtype) if isinstance(layout, ArraySpec) else np.zeros(0, np.float32)

    def count(self, reader: Any) -> Int64s:
        """Tokens of each sample, (n,).

        A damaged record may claim billions of tokens or images: no more are counted than there are bytes.
        """
        if self.size:
            column = f"present_{self.name}" if self.field.item_field is None else f"{self.name}.num_items"
            num_images = np.minimum(reader.column(column), reader.column(f"size_{self.name}"))
            return np.asarray(num_images * self.size)
        if self.field.item_field is None:
            counts = read_column(reader, self.column, "tokens")
        else:
            items = self.items(reader, np.arange(len(reader)))
            counts = np.fromiter((sum(count for _, count in part) for part in items), np.int64, len(reader))
        if self.entry[-1:] in (("num_tokens",), ("num_code_points",)):
            np.minimum(counts, reader.column(f"size_{self.name}"), out=counts)
        return counts

    def items(self, reader: Any, indices: Int64s) -> Iterator[list[tuple[int, int]]]:
        """Position and tokens of each item in some samples; a single image is at -2, a single array of tokens at -1."""
        if self.field.item_field is None:
            position = -2 if self.size else -1
            for count in self.count(reader)[indices].tolist():
                yield [(position, count)] if count else []
            return
        for table in reader.item_tables(self.name, indices):
            if table is None:
                yield []
                continue
            positions, records = table
            counts = [self.size] * len(positions) if self.size else take_entry(records, self.entry).tolist()
            yield list(zip(positions.tolist(), counts, strict=True))


def _sources(packer: SequencePacker, reader: Any, names: Sequence[str]) -> list[_Source]:
    """The modalities that have tokens: images, then token ids."""
    fields: Mapping[str, Field] = getattr(reader, "fields", {})
    found = []
    for name, size in packer.images.items():
        if name not in names or name not in fields:
            raise ConfigError("arguments", f"images.{name}", f"is not read: {', '.join(names)}")
        found.append(_Source(name=name, field=fields[name], size=size))
    columns = packer.tokens
    if columns is None:
        columns = tuple(f"{name}.num_tokens" for name in _names_of_tokens(reader, names))
    elif packer.pieces is None:
        raise ConfigError("arguments", "pieces", "is needed with tokens: it makes what they count")
    read = [name for name in fields if any(split_name(one, (name,)) for one in names)]  # whole or in parts
    known = {f"{name}.{'.'.join(keys)}": (name, keys) for name in read for keys in _entries(fields[name])}
    if not columns:
        counts = [column for column in known if column.endswith(".num_tokens")] or known
        detail = (
            "no modality that is read has num_tokens: give pieces, which makes tokens, and the columns that count them"
        )
        raise ConfigError("arguments", "tokens", f"{detail}, of {', '.join(counts) or 'modalities that have some'}")
    known |= {f"size_{name}": (name, ()) for name in read if fields[name].item_field is None}
    for column in columns:
        if column not in known:
            raise ConfigError("arguments", "tokens", f"no column {column!r}, there are {', '.join(known)}")
        name, keys = known[column]
        found.append(_Source(name=name, field=fields[name], entry=keys, column=column))
    return found


def _names_of_tokens(reader: Any, names: Iterable[str]) -> list[str]:
    """The modalities of token ids, single or in sequences."""
    fields: Mapping[str, Field] = getattr(reader, "fields", {})
    return [name for name in names if name in fields and ("num_tokens",) in _entries(fields[name])]


def _entries(field: Field) -> list[tuple[str, ...]]:
    """The keys of what the metadata record of a value, or of an item in a sequence, counts."""
    entries = record_entries((field.item_field or field).metadata_type)
    return [keys for keys, kind in entries if kind.kind in "iu" and not kind.shape]


def _default_pieces(sources: Sequence[_Source], sample: Mapping[str, Any]) -> list[Piece]:
    """Images and tokens of a sample in reading order."""
    items: list[tuple[int, Piece]] = []
    for source in sources:
        value = sample.get(source.name)
        if value is None:
            continue
        pairs = [(-2 if source.size else -1, value)] if source.field.item_field is None else value
        for position, item in pairs:
            if source.size:
                items.append((position, (source.name, item)))
            else:
                # A padded row of a batch of tokens has a mask.
                ids = item["input_ids"][item["attention_mask"] != 0] if isinstance(item, Mapping) else item
                items.append((position, ids))
    items.sort(key=lambda item: item[0])
    return [piece for _, piece in items]


def _stacked(name: str, values: list[Any], empty: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Images as one array."""
    if not values:
        return empty
    arrays = [np.asarray(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        hint = "set the decode_size of the image field, or resize them in a transform"
        raise CollateError(name, f"found images of shapes {shapes[0]} and {shapes[1]}, expected one shape: {hint}")
    return np.stack(arrays)


# --- planning ---------------------------------------------------------------------------------------------------------


def cut_sample(
    num_tokens: int, starts: Sequence[int], sizes: Sequence[int], length: int, *, between_images: bool
) -> list[tuple[int, int]]:
    """Cuts a sample into parts of at most `length` tokens, no image of it.

    Args:
        num_tokens: of the sample.
        starts: the first token of each image.
        sizes: tokens of each image, at most `length`.
        length: the most tokens of a part.
        between_images: cut before images, and text only where it is longer than a part between two of them.

    Returns:
        (first token, the one after the last) of each part.
    """
    parts = []
    start = 0
    while start < num_tokens:
        stop = min(start + length, num_tokens)
        last = bisect_right(starts, stop) - 1  # image that begins before the next part
        is_cut = between_images or (last >= 0 and starts[last] + sizes[last] > stop)
        if stop < num_tokens and last >= 0 and starts[last] > start and is_cut:
            stop = starts[last]
        parts.append((start, stop))
        start = stop
    return parts


def best_fit(sizes: Int64s, length: int) -> tuple[Int64s, int]:
    """Packs items into bins of one length: the largest item first, each into the fullest bin that has space for it.

    Items of one size are packed together, so that the time depends on the number of sizes more than of items.

    Args:
        sizes: (n,) of the items, from 1 to `length`.
        length: of a bin.

    Returns:
        (n,) int64, the bin of each item; and the number of bins.
    """
    order = np.argsort(-sizes, kind="stable")
    values, first = np.unique(-sizes[order], return_index=True)
    filled: list[int] = []  # the bin of each item, the largest first
    spaces: list[int] = []  # that bins have, ascending
    with_space: dict[int, list[int]] = {}  # the bins by their space
    num_bins = 0
    for size, (start, stop) in zip((-values).tolist(), pairwise([*first.tolist(), len(sizes)]), strict=True):
        while start < stop:
            at = bisect_left(spaces, size)
            space = spaces[at] if at < len(spaces) else length
            each = space // size  # a bin that takes one is the fullest for the next
            num_needed = -(-(stop - start) // each)
            if at < len(spaces):
                fullest = with_space[space]
                chosen = fullest[-num_needed:]
                del fullest[-num_needed:]
                if not fullest:
                    del with_space[space], spaces[at]
            else:
                chosen = list(range(num_bins, num_bins + num_needed))
                num_bins += num_needed
            num_placed = min(each * len(chosen), stop - start)
            filled += chosen if each == 1 else [chosen[item // each] for item in range(num_placed)]
            start += num_placed
            num_full, rest = divmod(num_placed, each)
            for left, same in ((space - each * size, chosen[:num_full]), (space - rest * size, chosen[num_full:])):
                if left and same:
                    if left not in with_space:
                        insort(spaces, left)
                    with_space.setdefault(left, []).extend(same)
    bins = np.empty(len(sizes), np.int64)
    bins[order] = filled
    return bins, num_bins
