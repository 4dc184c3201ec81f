"""The position of a loader, as JSON, and the check that a state is of this dataset and this order.

A state counts yielded samples, not those read ahead, in positions of the epoch that all ranks have received together.
So the state of one rank is that of every rank, and does not depend on their number or on the batch size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError, LoaderError
from mm_assets.formats import crc32c
from mm_assets.loading.order import Blocks
from mm_assets.loading.plan import Plan

__all__ = ["LoaderState", "fingerprint"]

VERSION = 3

# Samples that are read for a fingerprint without a manifest: enough to distinguish datasets, few enough to read them
# from a bucket.
NUM_PROBES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position in an epoch, by the fields of `EpochOrder` and the dataset's fingerprint.

    `delivered` is the position that all ranks have reached. `shuffle` is a bool, or the two numbers of `Blocks`.
    `groups` is the `settings` of a `GroupPlan`; None if single samples are divided.
    """

    version: int = VERSION
    fingerprint: str
    num_samples: int
    groups: Any
    shuffle: Any
    seed: int
    epoch: int
    delivered: int

    @classmethod
    def of(cls, plan: Plan, *, delivered: int, fingerprint: str) -> Self:
        """The state of a loader."""
        order = plan.order
        return cls(
            fingerprint=fingerprint,
            num_samples=order.num_samples,
            groups=plan.settings,
            shuffle=_plain(order.shuffle),
            seed=order.seed,
            epoch=order.epoch,
            delivered=delivered,
        )

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """A state from a checkpoint.

        Raises:
            LoaderError: it is not a state, or one of a later release.
        """
        expected = {field.name: str if field.name == "fingerprint" else int for field in fields(cls)}
        del expected["shuffle"], expected["groups"]  # any value: `check` compares them
        if not isinstance(state, Mapping) or "version" not in state:
            raise LoaderError("this is not a loader's state: it has no version")
        if state["version"] != VERSION:
            raise LoaderError(f"this state is of version {state['version']!r}, expected {VERSION}")
        for name, kind in expected.items():
            value = state.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise LoaderError(f"this is not a loader's state: {name} is {value!r}, expected {kind.__name__}")
        if not 0 <= state["delivered"] <= state["num_samples"]:
            detail = f"found {state['delivered']}, expected 0 to {state['num_samples']}"
            raise LoaderError(f"this is not a loader's state: delivered: {detail}")
        return cls(groups=state.get("groups"), shuffle=state.get("shuffle"), **{name: state[name] for name in expected})

    def check(self, plan: Plan, *, fingerprint: str) -> None:
        """Refuse a loader of other samples, or of another order or other groups of them.

        Raises:
            LoaderError: they differ; the message says in what.
        """
        own = LoaderState.of(plan, delivered=self.delivered, fingerprint=fingerprint)
        for name in ("groups", "num_samples", "fingerprint", "shuffle", "seed"):
            found, expected = getattr(self, name), getattr(own, name)
            if found != expected:
                what = "another dataset" if name in ("num_samples", "fingerprint") else "another order"
                raise LoaderError(f"the state is of {what}: its {name} is {found!r}, here it is {expected!r}")


def _plain(shuffle: bool | Blocks) -> bool | list[int]:
    return shuffle if isinstance(shuffle, bool) else [shuffle.size, shuffle.window]


def fingerprint(source: Any) -> str:
    """What identifies a dataset, wherever its files are and whatever their format: 64 hexadecimal digits.

    A source's own `fingerprint` attribute is used if it has one. Otherwise the digest is over the selection of samples
    and the manifest with the digests of its files or, without one, the ids and stored bytes of a few samples. The
    loader's modalities and their settings do not matter: a run may continue with others.
    """
    source = getattr(source, "samples", source)  # of a view of windows, the samples that they belong to
    own = getattr(source, "fingerprint", None)
    if own is not None:
        return str(own)
    facts: dict[str, Any] = {"num_samples": len(source)}
    manifest = getattr(source, "manifest", None)
    if manifest is not None:
        facts["files"] = [(file.partition, file.num_samples, file.size, file.sha256) for file in manifest.files]
    elif len(source):
        probes = np.unique(np.linspace(0, len(source) - 1, NUM_PROBES).astype(np.int64))
        facts["ids"] = [source.sample_ids[probe] for probe in probes.tolist()]
        facts["bytes"] = {name: _checksums(source, probes, name) for name in source.names}
    selection = getattr(source, "selection", None)
    if selection is not None:
        facts["selection"] = hashlib.sha256(np.asarray(selection, "<i8").tobytes()).hexdigest()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _checksums(source: Any, probes: npt.NDArray[np.int64], name: str) -> list[int | str | None]:
    """Checksums of stored bytes; damage is a word, so that a loader that skips it has states too."""
    found: list[int | str | None] = []
    for probe in probes.tolist():
        try:
            raw = source.read_raw([probe], [name])[name][0]
        except FormatError:
            found.append("damaged")
            continue
        found.append(None if raw is None else crc32c(raw))
    return found
