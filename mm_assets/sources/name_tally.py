"""Whether the rule by which keys end fits the names of a dataset's members, judged by the names of some samples.

Nothing here is read from a payload, and nothing is decided: where the rule seems to be the wrong one, a note says which
names show it and which setting selects the other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mm_assets.sources.member import MODALITY_OF_EXTENSION, split_member_name
from mm_assets.summaries import counted

__all__ = ["NameTally"]

MIN_ROLES = 8  # of one sample: fewer roles that no other sample has, or that are not words, are ordinary
RARE = 10  # a role of at most one in so many samples, or of one sample, is rare
MAX_ROLES_IN_NOTE = 5
_WORD = re.compile(r"[^\W\d][\w-]*")


class NameTally:
    """The member names of some samples.

    Args:
        roles: the setting `samples.roles`: None if a key ends at the first dot of a name.
    """

    def __init__(self, roles: Sequence[str] | None = None) -> None:
        self.roles = roles
        self._samples: list[tuple[str, list[str]]] = []  # key, and names of the members with this key

    def add(self, names: Iterable[str]) -> None:
        """Counts the members of one sample; those with another key than the first are of another sample."""
        parts = [(split_member_name(name, self.roles)[0], name) for name in dict.fromkeys(names)]
        if parts:
            self._samples.append((parts[0][0], [name for key, name in parts if key == parts[0][0]]))

    def note(self) -> str | None:
        """Returns what seems wrong with the rule, with an example and the setting that selects the other; else None."""
        return self._note_on_first_dots() if self.roles is None else self._note_on_roles(self.roles)

    def _note_on_first_dots(self) -> str | None:
        split = [[split_member_name(name) for name in names] for _, names in self._samples]
        num_with = Counter(role for parts in split for role in {role for _, role, _ in parts})
        plain = {frozenset(e for *_, e in parts) for parts in split if not any(role for _, role, _ in parts)}
        merged: list[tuple[str, str, str]] = []  # name, key and role of the first member with a role
        for (key, names), parts in zip(self._samples, split, strict=True):
            roles = {role for _, role, _ in parts if role}
            if not roles or any(extension not in MODALITY_OF_EXTENSION for _, role, extension in parts if role):
                continue
            num_odd = sum(not _is_role(role) for role in roles)
            are_rare = all(num_with[role] <= max(len(split) // RARE, 1) for role in roles)
            if num_odd >= MIN_ROLES or (are_rare and (num_odd or _alike(names, roles, plain))):
                number = next(n for n, (_, role, _) in enumerate(parts) if role)
                merged.append((names[number], key, parts[number][1]))
        if not merged:
            return None
        name, key, role = merged[0]
        return (
            f"{len(merged):,} of {counted(len(split), 'sampled sample')} may be several samples or have a wrong key: a "
            f"key ends at the first dot of a name, so that {name!a} has the key {key!a} and the role {role!a}. If such "
            "dots belong to the names, set `samples.roles` to `[]`, or to the roles that they do have: then a key ends "
            "at the last dot, before roles"
        )

    def _note_on_roles(self, roles: Sequence[str]) -> str | None:
        heads: Mapping[str, set[str]] = defaultdict(set)  # key without its last part -> these last parts
        for key, _ in self._samples:
            head, dot, last = key.rpartition(".")
            if dot and "/" not in last and _WORD.fullmatch(last):
                heads[head].add(last)
        shared = Counter(last for lasts in heads.values() if len(lasts) > 1 for last in lasts)
        usual = [last for last, count in shared.most_common() if count * RARE >= len(heads) and count > 1]
        if len(usual) < 2:
            return None
        shown = ", ".join(sorted(usual[:MAX_ROLES_IN_NOTE]))
        return (
            f"the keys of many sampled samples differ only in their last part, such as {shown!a}: if those parts are "
            f"roles of one sample's members, add them to `samples.roles`, which is {list(roles)}"
        )


def _is_role(role: str) -> bool:
    """Whether a text looks like the name of a role: words, with numbers between them, or one number."""
    parts = role.split(".")
    words = [_WORD.fullmatch(part) is not None for part in parts]
    return (any(words) or len(parts) == 1) and all(w or p.isdecimal() for w, p in zip(words, parts, strict=True))


def _alike(names: Sequence[str], roles: set[str], plain: set[frozenset[str]]) -> bool:
    """Whether the members of a sample fall into samples that are alike if a key ends at the last dot.

    Args:
        names: of the members.
        roles: theirs, if a key ends at the first dot.
        plain: the extensions of samples whose members have no role.
    """
    pieces: Mapping[str, set[str]] = defaultdict(set)
    for name in names:
        key, _, extension = split_member_name(name, ())
        pieces[key].add(extension)
    kinds = {frozenset(piece) for piece in pieces.values()}
    (kind, *others) = kinds
    return not others and (kind in plain or len(kind) > 1 or len(roles) >= MIN_ROLES)
