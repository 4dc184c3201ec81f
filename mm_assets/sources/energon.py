"""Energon, the folders of NVIDIA's Megatron-Energon: tars, and ``.nv-meta`` with what is read of them.

``.info.json`` (or ``.info.yaml``) lists the shards with their numbers of samples, ``split.yaml`` (or ``split.json``)
which of them are in a split, and which shards and samples are excluded. What Energon leaves out is listed and skipped.
Its indices are not read, and its ``dataset.yaml`` is not applied: the names of members say what they are.
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
MAX_FOLDERS_ABOVE = 8  # of a shard, of which one has the folder
MAX_JSON_BYTES = 64 << 20  # of some million shards
MAX_YAML_BYTES = 8 << 20  # which takes seconds to parse

_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where it is built in
_META = re.compile(r"__[^/]*__(?:$|/)")
_SAMPLE = re.compile(r"((?:.*/|)[^.]+)\.[^/]*", re.DOTALL)


class _Described(NamedTuple):
    """What the files of a dataset's folder state about a shard.

    Attributes:
        name: its path below the folder.
        num_samples: its samples, or None if it is not listed.
        splits: those that have it, sorted.
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
    def _described(self) -> _Described:
        """What the files of the dataset's folder state about the shard.

        Raises:
            ShardError: there is no such folder, or it cannot be read.
        """
        above, parts = "", self.file.url.rpartition("?")[0] or self.file.url
        names = parts.split("/")
        for depth in range(1, min(MAX_FOLDERS_ABOVE, len(names) - 1) + 1):
            info = _read(self.file, above, INFO_NAMES)
            if info is not None:
                return self._found(info, _read(self.file, above, SPLIT_NAMES), "/".join(names[-depth:]))
            above += "../"
        detail = f"has no {FOLDER}/{INFO_NAMES[0]} in its folder or above: run `energon prepare`, or read it as `tar`"
        raise ShardError(self.file.url, detail, byte_offset=0)

    def _found(self, info: Any, split: Any, name: str) -> _Described:
        counts = info.get("shard_counts") if isinstance(info, dict) else None
        if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
            detail = f"{FOLDER}/{INFO_NAMES[0]} has no shard_counts with the number of samples of each shard"
            raise ShardError(self.file.url, detail, byte_offset=0)
        if split is None:
            split = {"split_parts": {"all": list(counts)}}
        elif not isinstance(split, dict):
            split = {}
        splits, excluded_names = split.get("split_parts"), split.get("exclude", [])
        if not isinstance(splits, dict) or not all(map(_is_of_texts, [*splits.values(), excluded_names])):
            detail = f"{FOLDER}/{SPLIT_NAMES[0]} has no split_parts with lists of shards, or exclude is not a list"
            raise ShardError(self.file.url, detail, byte_offset=0)
        try:
            of_shard = [one for one, listed in splits.items() if name in _expanded(listed)]
            excluded = _expanded(excluded_names)
        except ValueError as error:
            detail = f"{FOLDER}/{SPLIT_NAMES[0]} has a list in braces that {first_line(error)}"
            raise ShardError(self.file.url, detail, byte_offset=0) from error
        keys = None
        if name not in excluded:
            keys = frozenset(each[len(name) + 1 :] for each in excluded if each.startswith(f"{name}/"))
        return _Described(name, counts.get(name), tuple(sorted(map(str, of_shard))), keys)

    def _with_reason(self, member: Member) -> Member:
        """A member with the reason why Energon does not read it, if there is one."""
        described = self._described
        if member.skip_reason is not None:
            return member
        reason = None
        if described.num_samples is None or not described.splits:
            place = INFO_NAMES[0] if described.num_samples is None else SPLIT_NAMES[0]
            reason = f"the shard {described.name!a} is not in {FOLDER}/{place}"
        elif described.excluded is None or member.sample_key in described.excluded:
            reason = f"excluded by {FOLDER}/{SPLIT_NAMES[0]}"
        elif _key_of(member) is None:
            reason = "no part of a sample by the rules of Energon"
        return member if reason is None else member._replace(skip_reason=reason)

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every entry of the shard, in order; arguments and errors as `Source.members`.

        Another number of samples than the folder states is damage of the whole shard.
        """
        last, count, ordinal = None, 0, 0
        for member in super().members(on_damaged_shard=on_damaged_shard, damage=damage):
            if (key := _key_of(member)) not in (None, last):
                last, count = key, count + 1
            ordinal = member.ordinal + 1
            yield self._with_reason(member)
        expected = self._described.num_samples
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
        """The content of chosen members, in one pass over the shard; arguments and errors as `Source.payloads`."""
        found = super().payloads(
            wanted=lambda member: wanted(self._with_reason(member)),
            max_bytes=max_bytes,
            on_error=on_error and (lambda member, error: on_error(self._with_reason(member), error)),
            on_damaged_shard=on_damaged_shard,
            damage=damage,
        )
        for member, payload in found:
            yield self._with_reason(member), payload


def _expanded(texts: Sequence[str]) -> set[str]:
    """Returns what texts with lists in braces stand for; `ValueError` if it is too much."""
    found, number = set[str](), 0
    for text in texts:
        expanded = expand_braces(text) if "{" in text else (text,)
        found.update(expanded)
        number += len(expanded)
        if number > MAX_EXPANDED:
            raise ValueError(f"with the others stands for more than {MAX_EXPANDED:,} texts")
    return found


def _is_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_metadata(name: str) -> bool:
    """Whether Energon passes over a member by its name: those in folders such as ``__index__``."""
    return _META.match(name) is not None


def _key_of(member: Member) -> str | None:
    """The key by which Energon takes an entry for a part of a sample, by its type and its name; None for any other."""
    if member.member_type not in ("file", "sparse") or is_metadata(member.member):
        return None
    match = _SAMPLE.fullmatch(member.member)
    return None if match is None else match[1]


def _read(file: SourceFile, above: str, names: Sequence[str]) -> Any:
    """The first of some files of the folder as JSON or YAML has it; None if there is none.

    Raises:
        ShardError: it is too large, or neither.
    """
    for name in names:
        try:
            found = file.beside(f"{above}{FOLDER}/{name}")
        except SourceError:  # it may have another name, or be above
            continue
        limit = MAX_YAML_BYTES if name.endswith(".yaml") else MAX_JSON_BYTES
        if found.size > limit:
            raise ShardError(found.url, f"has {found.size:,} bytes, at most {limit:,} are read", byte_offset=0)
        try:
            text = found.read(0, found.size).decode()
            return yaml.load(text, _YAML_LOADER) if name.endswith(".yaml") else parse_json(text)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ShardError(found.url, f"cannot be read: {first_line(error)}", byte_offset=0) from error
    return None
