"""Energon, the folders of NVIDIA's Megatron-Energon: tars, and ``.nv-meta`` with what Energon reads of them.

``.info.json`` (or ``.info.yaml``) lists the shards with their numbers of samples; ``split.yaml`` (or ``split.json``)
lists the shards of each split, and the shards and samples that are excluded. What Energon excludes is an entry with the
reason. Its indices are not read, and its ``dataset.yaml`` is not applied: the names of members say what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import yaml

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.json_text import parse_json
from mm_assets.sources.member import Member, OnDamage, ShardDamage, skipped_bytes
from mm_assets.sources.tar import MAX_PAYLOAD, TarSource
from mm_assets.storage.braces import MAX_EXPANDED, expand_braces
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["EnergonSource", "is_metadata"]

FOLDER = ".nv-meta"
INFO_NAMES = (".info.json", ".info.yaml")
SPLIT_NAMES = ("split.yaml", "split.json")
MAX_FOLDERS_ABOVE = 8  # of a shard that are searched for the folder
MAX_JSON_BYTES = 64 << 20  # of some million shards
MAX_YAML_BYTES = 8 << 20  # parsing as much takes seconds

_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where it is built in
_META = re.compile(r"__[^/]*__(?:$|/)")
_SAMPLE = re.compile(r"((?:.*/|)[^.]+)\.[^/]*", re.DOTALL)


class _ShardInfo(NamedTuple):
    """What the files of a dataset's folder say about a shard.

    Attributes:
        name: its path below the folder.
        num_samples: its samples, or None if it is not listed.
        splits: names of the splits that have it, sorted.
        excluded: keys of samples that are left out; None for all.
    """

    name: str
    num_samples: int | None
    splits: tuple[str, ...]
    excluded: frozenset[str] | None


class EnergonSource(TarSource):
    """A shard of a dataset that Energon prepared; see `mm_assets.sources.base.Source`."""

    MARKS: ClassVar[tuple[str, ...]] = tuple(f"{FOLDER}/{name}" for name in INFO_NAMES)

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the tars of a folder, described by what lists and splits them; excluded ones have no samples."""
        names = {f"/{FOLDER}/{name}" for name in (*INFO_NAMES, *SPLIT_NAMES)}
        marks = [file for file in files if any(file.url.endswith(name) for name in names)]
        shards = [file for file in files if file.url.lower().endswith(cls.SUFFIXES) and f"/{FOLDER}/" not in file.url]
        return [shard.described_by(marks) for shard in shards] or None

    @cached_property
    def _info(self) -> _ShardInfo:
        """What the files of the dataset's folder say about the shard.

        Raises:
            ShardError: there is no such folder, or it cannot be read.
        """
        above, parts = "", self.file.url.rpartition("?")[0] or self.file.url
        names = parts.split("/")
        for depth in range(1, min(MAX_FOLDERS_ABOVE, len(names) - 1) + 1):
            info = _read(self.file, above, INFO_NAMES)
            if info is not None:
                return self._shard_info(info, _read(self.file, above, SPLIT_NAMES), "/".join(names[-depth:]))
            above += "../"
        detail = f"has no {FOLDER}/{INFO_NAMES[0]} in its folder or above: run `energon prepare`, or read it as `tar`"
        raise ShardError(self.file.url, detail, byte_offset=0)

    def _shard_info(self, info: Any, split: Any, name: str) -> _ShardInfo:
        counts = info.get("shard_counts") if isinstance(info, dict) else None
        if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
            detail = f"{FOLDER}/{INFO_NAMES[0]} has no shard_counts with the number of samples of each shard"
            raise ShardError(self.file.url, detail, byte_offset=0)
        if split is None:
            split = {"split_parts": {"all": list(counts)}}
        elif not isinstance(split, dict):
            split = {}
        splits, excluded_names = split.get("split_parts"), split.get("exclude", [])
        if not isinstance(splits, dict) or not all(map(_is_list_of_texts, [*splits.values(), excluded_names])):
            detail = f"{FOLDER}/{SPLIT_NAMES[0]} has no split_parts with lists of shards, or exclude is not a list"
            raise ShardError(self.file.url, detail, byte_offset=0)
        try:
            shard_splits = [split for split, shards in splits.items() if name in _expand(shards)]
            excluded = _expand(excluded_names)
        except ValueError as error:
            detail = f"{FOLDER}/{SPLIT_NAMES[0]} has a list in braces that {first_line(error)}"
            raise ShardError(self.file.url, detail, byte_offset=0) from error
        keys = None
        if name not in excluded:
            keys = frozenset(each[len(name) + 1 :] for each in excluded if each.startswith(f"{name}/"))
        return _ShardInfo(name, counts.get(name), tuple(sorted(map(str, shard_splits))), keys)

    def _with_reason(self, member: Member) -> Member:
        """Returns a member with the reason why Energon does not read it, if there is one."""
        info = self._info
        if member.skip_reason is not None:
            return member
        reason = None
        if info.num_samples is None or not info.splits:
            place = INFO_NAMES[0] if info.num_samples is None else SPLIT_NAMES[0]
            reason = f"the shard {info.name!a} is not in {FOLDER}/{place}"
        elif info.excluded is None or member.sample_key in info.excluded:
            reason = f"excluded by {FOLDER}/{SPLIT_NAMES[0]}"
        elif _key_of(member) is None:
            reason = "no part of a sample by the rules of Energon"
        return member if reason is None else member._replace(skip_reason=reason)

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Yields every entry of the shard, in order; arguments and errors as `Source.members`.

        Another number of samples than the folder says is damage of the whole shard.
        """
        last, count, ordinal = None, 0, 0
        for member in super().members(on_damaged_shard=on_damaged_shard, damage=damage):
            if (key := _key_of(member)) not in (None, last):
                last, count = key, count + 1
            ordinal = member.ordinal + 1
            yield self._with_reason(member)
        expected = self._info.num_samples
        if expected not in (None, count):
            detail = f"has {count} samples, {FOLDER}/{INFO_NAMES[0]} states {expected}: run `energon prepare` again"
            if on_damaged_shard == "fail":
                raise ShardError(self.file.url, detail, byte_offset=self.file.size)
            if damage is not None:
                damage.append(ShardDamage(byte_offset=self.file.size, byte_size=0, detail=detail))
            end = self.file.size
            yield skipped_bytes(self.file.url, end, end, ordinal=ordinal, reason=f"damaged: {detail}")

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int = MAX_PAYLOAD,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """Yields chosen members with their content, in one pass; arguments and errors as `Source.payloads`."""
        payloads = super().payloads(
            wanted=lambda member: wanted(self._with_reason(member)),
            max_bytes=max_bytes,
            on_error=on_error and (lambda member, error: on_error(self._with_reason(member), error)),
            on_damaged_shard=on_damaged_shard,
            damage=damage,
        )
        for member, payload in payloads:
            yield self._with_reason(member), payload


def _expand(texts: Sequence[str]) -> set[str]:
    """Returns the texts that patterns with lists in braces stand for; `ValueError` if they are too many."""
    result, number = set[str](), 0
    for text in texts:
        names = expand_braces(text) if "{" in text else (text,)
        result.update(names)
        number += len(names)
        if number > MAX_EXPANDED:
            raise ValueError(f"with the others stands for more than {MAX_EXPANDED:,} texts")
    return result


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_metadata(name: str) -> bool:
    """Returns whether Energon ignores a member because of its name, as it ignores folders such as ``__index__``."""
    return _META.match(name) is not None


def _key_of(member: Member) -> str | None:
    """Returns the key of the sample that Energon counts an entry to, by its type and name; None if it ignores it."""
    if member.member_type not in ("file", "sparse") or is_metadata(member.member):
        return None
    match = _SAMPLE.fullmatch(member.member)
    return None if match is None else match[1]


def _read(file: SourceFile, above: str, names: Sequence[str]) -> Any:
    """Parses the first of some files that the folder has, JSON or YAML; returns None if it has none.

    Raises:
        ShardError: it is too large, or neither.
    """
    for name in names:
        try:
            metadata = file.beside(f"{above}{FOLDER}/{name}")
        except SourceError:  # it may have another name, or be above
            continue
        limit = MAX_YAML_BYTES if name.endswith(".yaml") else MAX_JSON_BYTES
        if metadata.size > limit:
            raise ShardError(metadata.url, f"has {metadata.size:,} bytes, at most {limit:,} are read", byte_offset=0)
        try:
            text = metadata.read(0, metadata.size).decode()
            return yaml.load(text, _YAML_LOADER) if name.endswith(".yaml") else parse_json(text)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ShardError(metadata.url, f"cannot be read: {first_line(error)}", byte_offset=0) from error
    return None
