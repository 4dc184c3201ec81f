"""Batches for training: shuffled, the same on any number of ranks, read ahead by threads, resumable at any batch.

Each sample is yielded exactly once per epoch over all ranks. The content of a batch depends on dataset, seed, epoch and
position in the epoch only, never on threads or timing. A loader has one position, which its iterations move: after an
iteration that is left early, the next epoch begins, unless a state is loaded. No thread outlives its iteration.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import count, islice
from typing import Any, Self, TypeVar

from mm_assets.dataset.prefetch import Prefetch
from mm_assets.dataset.workers import count_threads
from mm_assets.errors import ConfigError, LoaderError, optional_import
from mm_assets.fields.parts import split_name
from mm_assets.loading.batches import BatchMaker, BatchSource, Collate, DamagedSample, Made, Transform
from mm_assets.loading.budget import Budget, BudgetGrouping, read_column
from mm_assets.loading.collate import MultimodalCollator
from mm_assets.loading.order import Blocks, EpochOrder, checked_number
from mm_assets.loading.plan import LAST, EpochPlan, GroupPlan, find_rank, torch_worker
from mm_assets.loading.rules import Rule, check_integer
from mm_assets.loading.sequence_packer import PackedGrouping, SequencePacker
from mm_assets.loading.state import LoaderState, fingerprint
from mm_assets.loading.windows import Window
from mm_assets.summaries import describe

__all__ = ["BatchIterator", "BatchLoader", "Iteration", "LoaderStats", "MultimodalLoader", "share_of_worker"]

T = TypeVar("T")

_ENTRIES = ("valid", "index", "present", "lengths")  # of every batch, beside the collator's outputs
MAX_REPORTED = 10_000  # damaged samples that are listed: a lost shard must not fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Where the time of a loader's batches went, in seconds.

    The time of a batch is that from the moment when a thread begins to make it until it is yielded. The first five
    numbers after `num_batches` are its parts, of all batches together: threads make several at a time.

    Attributes:
        num_batches: that were yielded.
        storage: reading, with checksums. Pages of local files that are not in memory are read when a codec touches
            them, and count as `decode`.
        decode: decoding.
        transform: the functions `transforms` and `transform`.
        collate: the collator.
        wait: complete, and waiting for the training loop. If it is large, the loop is the limit.
        starved: how long the training loop waited for batches. If it is large, the loader is the limit, by the largest
            of the parts above.
    """

    num_batches: int = 0
    storage: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    wait: float = 0.0
    starved: float = 0.0

    @property
    def total(self) -> float:
        """The time of all batches."""
        return self.storage + self.decode + self.transform + self.collate + self.wait


class BatchLoader(ABC):
    """What the loader of a dataset and a mix share: epochs of batches, and one position in them."""

    _is_used: bool  # whether the next iteration is of the next epoch

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that the next batch is of."""

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; after `load_state_dict`, stays in the loaded epoch where that is the same.

        So a training loop may call it before every epoch, and continues within one after `load_state_dict`.

        Raises:
            ConfigError: it is not an integer from 0, or too large.
        """
        epoch = checked_number("epoch", epoch, 0)
        if epoch != self.epoch or self._is_used:
            self._go_to(epoch)

    def rewind(self) -> None:
        """Goes back to the start of the epoch."""
        self._go_to(self.epoch)

    @abstractmethod
    def _go_to(self, epoch: int) -> None:
        """Goes to the start of an epoch; an iteration in progress ends."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of this rank in the whole epoch."""

    @abstractmethod
    def count_batches(self, epoch: int) -> int:
        """As `len`, of another epoch."""

    def __iter__(self) -> Iteration:
        """The batches of the next epoch, or those after a loaded state; an iteration in progress ends.

        Raises:
            ConfigError: the loader was made before this process had its rank.
        """
        return self.iterate_from(0)

    @abstractmethod
    def iterate_from(self, num_batches: int) -> Iteration:
        """As `__iter__`, without the first batches; in a worker of torch, those of this worker."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was yielded last, as plain values for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`; `LoaderError`, and nothing is changed, if it is of another loader."""

    @abstractmethod
    def stats(self) -> LoaderStats:
        """Where the time of the batches went that were yielded so far."""

    def torch(self) -> Any:
        """The batches as a `torch.utils.data.IterableDataset`, for code that expects one.

        It goes into ``DataLoader(loader.torch(), batch_size=None, num_workers=n)``: the workers share the batches of
        this rank, each is yielded once and in order, and with `torchdata`'s ``StatefulDataLoader`` every worker resumes
        at its own next batch. `set_epoch` works between epochs.

        Raises:
            MissingExtraError: torch is not installed.
        """
        with optional_import("torch", f"{type(self).__name__}.torch"):
            import_module("torch")
        from mm_assets.loading.torch_dataset import TorchDataset

        return TorchDataset(self)


class MultimodalLoader(BatchLoader):
    """Batches of a dataset.

    Each iteration yields the batches of one epoch, each time another order of the same samples; after
    `load_state_dict`, the rest of the epoch. In a worker process of torch's DataLoader, as in an `IterableDataset`, it
    yields the worker's share of them: all workers together yield each batch once, in order.

    A batch is the result of the collator, by default a dict of arrays and lists by modality, with ``present`` (modality
    to (n,) bool), ``valid``, (n,) bool, and ``index``, (n,) int64, the samples in the dataset. Rows that are not valid
    repeat another sample.

    Arrays of a batch are the caller's for as long as it holds them or a view of them.

    Args:
        reader: the dataset.
        modalities: names of modalities, or of parts, to read; by default those that the collator needs, or all.
            Nothing else is touched.
        batch_size: samples of a batch, on each rank; or a `Budget`, for batches of a variable number of samples whose
            padded size is limited; or sequences of a batch, if the collator is a `SequencePacker`.
        shuffle: True, a permutation of all samples; `Blocks`, which keeps neighbors near each other, for storage where
            random access is expensive; False, the dataset's order.
        num_workers: threads, each of which makes a batch, or, where they are more than `prefetch`, parts of those
            batches; 0 makes every batch when it is requested, without any thread.
        collator: a `MultimodalCollator`, or any callable that makes a batch of a list of samples; one with a parameter
            ``rng`` gets a `numpy.random.Generator` that depends on seed, epoch and the batch's samples only. If the
            batch is a dict, ``valid`` and ``index`` are added to it. A `SequencePacker` packs the tokens of samples
            into sequences of one length.
        last: what becomes of the remainder at the end, too small for a whole batch on each rank. ``"even"``: it is
            shared equally, and a few samples are repeated, not valid, where it does not divide; so every rank has the
            same number of batches, of the same sizes. ``"drop"``: it is left out. ``"short"``: it is shared without
            repeats, and some ranks have a smaller last batch than others, or none.
        seed: of the order, and of the transforms' randomness.
        rank: of this process, with `world_size`; by default what torch.distributed, jax.distributed or the environment
            of torch, SLURM, Open MPI, MPICH or JAX say, which must not contradict each other.
        world_size: number of ranks.
        prefetch: batches that wait for the consumer, while at most as many are being made.
        transforms: by modality, a function of a value to a value (None: absent), called in the threads before
            `transform`. One with a parameter ``rng`` gets a `numpy.random.Generator` that depends on seed, epoch and
            sample only.
        transform: a function of a whole sample, a dict of values by modality (None: absent), to such a dict, which may
            have other names; called in the threads before the collator, with ``rng`` as above. Arrays are rows of the
            batch and may be written to. All modalities are then read by default.
        window: a `Window` of each sample in place of all of it; ``window``, (n, 2) float64, of a batch has the start
            and duration of each in seconds.
        on_damaged: ``"raise"``, or ``"skip"``: another sample of the batch replaces it, not valid, and the damaged one
            is reported in `damaged`.

    Attributes:
        reader: the dataset.
        modalities: names of the modalities that are read.
        batch_size: as given.
        shuffle: as given.
        num_workers: as given.
        collator: makes the batches.
        plan: how the epoch is divided: its order, the batch size, and the rank.
        damaged: the first 10,000 samples that were left out.
        num_damaged: how many were left out.

    Raises:
        ConfigError: an argument is wrong.
        KeyError: no such modality.
        TypeError: a path instead of a dataset.
    """

    def __init__(
        self,
        reader: BatchSource,
        modalities: Sequence[str] | None = None,
        batch_size: int | Budget = 32,
        shuffle: bool | Blocks = True,
        num_workers: int = 4,
        collator: Collate | None = None,
        *,
        last: str = "even",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int = 2,
        transforms: Mapping[str, Transform] | None = None,
        transform: Transform | None = None,
        window: Window | None = None,
        on_damaged: str = "raise",
    ) -> None:
        if isinstance(reader, str | os.PathLike):
            raise TypeError(f"found the path {os.fspath(reader)!r}, expected what mm_assets.open gives for it")
        self.damaged: list[DamagedSample] = []
        self.num_damaged = 0
        self.reader = reader
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_workers = num_workers
        _check_callable("collator", collator, "a MultimodalCollator, to which such rules can be given, or a function")
        self.collator: Collate = MultimodalCollator() if collator is None else collator
        _check_callable("transform", transform, "a function of a sample, a dict of values by modality")
        entries = (*_ENTRIES, "window") if window is not None else _ENTRIES
        whole = reader.names if window is not None else transforms or ()  # what is not read in parts
        self.modalities = _choose_names(
            reader, modalities, self.collator, entries, whole, has_transform=transform is not None
        )
        if window is not None and not isinstance(window, Window):
            raise ConfigError("arguments", "window", f"found {describe(window)}, expected a Window(seconds=…)")
        self._window = window
        self._transform = transform
        self._transforms = dict(transforms or {})
        for name, transform in self._transforms.items():
            _check_callable(f"transforms.{name}", transform, "a function of a value")
            if name not in self.modalities:
                raise ConfigError("arguments", f"transforms.{name}", f"is not read: {', '.join(self.modalities)}")
        try:
            self._threads = count_threads(num_workers)
        except ValueError as error:
            raise ConfigError("arguments", "num_workers", str(error)) from error
        if not isinstance(batch_size, Budget):
            check_integer("batch_size", batch_size, 1)
        elif isinstance(self.collator, SequencePacker):
            raise ConfigError("arguments", "batch_size", "is a number of sequences with a SequencePacker")
        check_integer("prefetch", prefetch, 1)
        for name, value, allowed in (("on_damaged", on_damaged, ("raise", "skip")), ("last", last, LAST)):
            if value not in allowed:
                raise ConfigError("arguments", name, f"found {value!r}, expected one of {', '.join(allowed)}")
        self._prefetch = prefetch
        self._skip_damaged = on_damaged == "skip"
        self._finds_rank = rank is None and world_size is None
        found_rank, found_world_size = find_rank(rank, world_size)
        grouping: PackedGrouping | BudgetGrouping | None = None
        self._collate = self.collator
        if isinstance(self.collator, SequencePacker):
            grouping = PackedGrouping(self.collator, reader, self.modalities)
            self._collate = grouping.collate
        elif isinstance(batch_size, Budget):
            grouping = BudgetGrouping(batch_size, read_column(reader, batch_size.column, "batch_size"))
        order = EpochOrder(num_samples=len(reader if grouping is None else grouping), shuffle=shuffle, seed=seed)
        ranks: dict[str, Any] = {"rank": found_rank, "world_size": found_world_size, "last": last}
        size = 1 if isinstance(batch_size, Budget) else batch_size
        self.plan: EpochPlan | GroupPlan = (
            EpochPlan(order=order, batch_size=size, **ranks)
            if grouping is None
            else GroupPlan(order=order, grouping=grouping, batch_size=size, **ranks)
        )
        self._delivered = 0
        self._is_used = False  # whether the next iteration is of the next epoch
        self._stats = LoaderStats()
        if last == "drop" and len(reader) and next(self.plan.steps(), None) is None:
            step = f"batch_size {batch_size} on {found_world_size} ranks" if found_world_size > 1 else "batch_size"
            message = f'last="drop" leaves out all {len(reader):,} samples: they are fewer than {step} takes'
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._current: weakref.ref[Iteration] | None = None  # or that of the mix that the loader is in

    # --- the epoch ----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of."""
        return self.plan.order.epoch

    def _go_to(self, epoch: int) -> None:
        self._move(replace(self.plan.order, epoch=epoch), 0)

    def _move(self, order: EpochOrder, delivered: int) -> None:
        """Go to a position; an iteration in progress ends."""
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()
        self._current = None
        if order != self.plan.order:
            self.plan = replace(self.plan, order=order)
        self._delivered = delivered
        self._is_used = False

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch; with a budget or a packer, other epochs may have others."""
        return self.plan.count()

    def count_batches(self, epoch: int) -> int:
        """As `len`, of another epoch."""
        return replace(self.plan, order=replace(self.plan.order, epoch=epoch)).count()

    def iterate_from(self, num_batches: int) -> BatchIterator:
        """As `__iter__`, without the first batches; in a worker of torch, those of this worker."""
        if self._is_used and not num_batches:
            self._go_to(self.epoch + 1)
        iterator = BatchIterator(self, num_batches)
        self._begin(iterator)
        return iterator

    def _begin(self, iteration: Iteration) -> None:
        """Begins an iteration from the position on; another one in progress ends."""
        if self._finds_rank:
            rank, world_size = find_rank(None, None)
            if world_size > 1 and (rank, world_size) != (self.plan.rank, self.plan.world_size):
                made = f"the loader was made as rank {self.plan.rank} of {self.plan.world_size}"
                advice = "make it after the process group is initialized, or give it rank and world_size"
                detail = f"{made}, and this process is rank {rank} of {world_size}: {advice}"
                raise ConfigError("environment", "rank, world_size", detail)
        self._move(self.plan.order, self._delivered)
        self._current = weakref.ref(iteration)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was yielded last, as plain values for a checkpoint.

        It is the same on every rank that has received as many batches.
        """
        state = LoaderState.of(self.plan, delivered=self._delivered, fingerprint=self._fingerprint)
        return asdict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`, also one of other ranks and another batch size.

        Raises:
            LoaderError: it is of another dataset or another order; nothing is changed then.
        """
        found = self.check_state(state)
        self._move(replace(self.plan.order, epoch=found.epoch), found.delivered)

    def check_state(self, state: Mapping[str, Any]) -> LoaderState:
        """Parse a state; `LoaderError` if it is not one of this dataset and this order."""
        found = LoaderState.from_json(state)
        found.check(self.plan, fingerprint=self._fingerprint)
        return found

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.reader)

    def stats(self) -> LoaderStats:
        """Where the time of the batches went that were yielded so far."""
        return self._stats

    # --- what iterations use ------------------------------------------------------------------------------------------

    @property
    def _num_readers(self) -> int:
        """Threads that make batches; each of the others makes a part of one.

        A thread that makes a whole batch does not wait for another's last sample. If fewer batches are read ahead than
        there are threads, all threads share them.
        """
        return min(self._threads, self._prefetch)

    def _make_maker(self) -> tuple[BatchMaker, Callable[[], None]]:
        """Returns what makes the batches of an iteration, and the function that ends it."""
        # With its own pool of threads, which end with the iteration; the files are shared.
        share: Callable[[Mapping[str, Any]], Any] | None = getattr(self.reader, "with_settings", None)
        own = None if share is None else share(self._settings())
        maker = BatchMaker(
            self.reader if own is None else own,
            self.modalities,
            self.plan,
            collator=self._collate,
            transforms=self._transforms,
            transform=self._transform,
            threads=self._threads if self._threads > self._num_readers else 0,
            first_threads=self._threads,
            keep=self._prefetch + self._num_readers + 2,  # one that the caller holds, and one that it has just dropped
            skip_damaged=self._skip_damaged,
            window=self._window,
        )

        def end() -> None:
            maker.close()
            if own is not None:
                own.close()

        return maker, end

    def _start(self, skip: int) -> Prefetch[Made]:
        """Begin to read from the loader's position on, without the first batches of this worker."""
        maker, end = self._make_maker()
        steps = share_of_worker(self.plan.steps(self._delivered), skip)
        tasks = (partial(maker.make, number, step) for number, step in steps)
        return Prefetch(tasks, threads=self._num_readers, depth=self._prefetch + self._num_readers, on_end=end)

    def _settings(self) -> dict[str, Any]:
        """The settings with which the values of windows have one shape, by modality."""
        window, fields = self._window, getattr(self.reader, "fields", {})
        if window is None:
            return {}
        return {
            name: fields[name].window_settings(window.seconds, window.frames)
            for name in self.modalities
            if name in fields
        }

    def _deliver(self, made: Made, asked: float) -> None:
        """Count a batch that is yielded, and was asked for at a time of `time.perf_counter`."""
        now, before = time.perf_counter(), self._stats
        begun, read, decoded, transformed, collated = made.times
        self._stats = LoaderStats(
            num_batches=before.num_batches + 1,
            storage=before.storage + read - begun,
            decode=before.decode + decoded - read,
            transform=before.transform + transformed - decoded,
            collate=before.collate + collated - transformed,
            wait=before.wait + now - collated,
            starved=before.starved + now - asked,
        )
        self._delivered = made.stop
        self._is_used = True
        self.num_damaged += len(made.damaged)
        self.damaged.extend(made.damaged[: MAX_REPORTED - len(self.damaged)])

    def _finish(self) -> None:
        """Continue with the next epoch."""
        self._current = None
        self._go_to(self.epoch + 1)


class Iteration(Iterator[Any]):
    """The batches of the rest of an epoch; a loader has one at a time."""

    def __init__(self) -> None:
        self._closed = False
        self._superseded = False

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            FormatError: a sample is damaged, and those are not skipped; notes say which batch it is in.
            LoaderError: the loader was iterated over again or moved since; or all remaining samples are damaged.
            CollateError: values do not fit the collator's rules.
        """
        if self._superseded:
            raise LoaderError("this iteration has ended: the loader was iterated over again, or moved")
        if self._closed:
            raise StopIteration
        try:
            return self._make()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _make(self) -> Any:
        """The next batch, of which the loader takes note; `StopIteration` at the end."""

    def supersede(self) -> None:
        """End it because another one begins; its next batch is an error, rather than one of the other's."""
        self._superseded |= not self._closed
        self.close()

    def close(self) -> None:
        """End the reading ahead and wait for its threads; the loader keeps its position. Fine twice."""
        self._closed = True
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Ends the reading ahead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchIterator(Iteration):
    """The batches of the rest of an epoch; made by iterating over a loader.

    Its threads start with the first batch, and end with the last one, with an error, with `close`, or when no reference
    to it is left, such as after a ``break``.
    """

    def __init__(self, loader: MultimodalLoader, skip: int = 0) -> None:
        super().__init__()
        self._loader = loader
        self._skip = skip
        self._ahead: Prefetch[Made] | None = None

    def _make(self) -> Any:
        asked = time.perf_counter()
        if self._ahead is None:
            self._ahead = self._loader._start(self._skip)
        made = next(self._ahead, None)
        if made is None:
            self._loader._finish()
            raise StopIteration
        self._loader._deliver(made, asked)
        return made.batch

    def _end(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def share_of_worker(steps: Iterable[T], skip: int) -> Iterator[tuple[int, T]]:
    """The steps of this worker of torch, all of them in no worker, with their numbers; without its first ones."""
    worker, num_workers = torch_worker()
    return islice(zip(count(), steps), worker + skip * num_workers, None, num_workers)


def _check_callable(key: str, value: object, expected: str) -> None:
    """Refuse, with `ConfigError`, an argument that cannot be called."""
    if value is not None and not callable(value):
        raise ConfigError("arguments", key, f"found {describe(value)}, expected {expected}")


def _choose_names(
    reader: BatchSource,
    modalities: Sequence[str] | None,
    collator: Collate,
    entries: Sequence[str],
    whole: Collection[str],
    *,
    has_transform: bool,
) -> tuple[str, ...]:
    """The modalities and parts to read, and no output with the name of one of the `entries` that every batch has."""
    known = tuple(reader.names)
    find_part: Callable[[str], Any] | None = getattr(reader, "part", None)  # not every source reads parts
    rules = collator.rules if isinstance(collator, MultimodalCollator) and not has_transform else ()
    if isinstance(modalities, str):
        raise ConfigError("arguments", "modalities", f"found {modalities!r}, expected a list of names")
    asked: dict[str, Rule] = {}
    for rule in rules:
        split = rule.split(known)
        # The part alone, unless the value is needed whole; an unknown name is refused below.
        is_part = split is not None and find_part is not None and split[0] not in whole
        asked[rule.source if split is None or is_part else split[0]] = rule
    if modalities is None and isinstance(collator, SequencePacker) and not has_transform:
        modalities = collator.choose_modalities(reader)
    names = tuple(dict.fromkeys(modalities)) if modalities is not None else tuple(asked) or known
    for name in names:
        if name in known:
            continue
        if find_part is None or split_name(name, known) is None:
            raise KeyError(f"no modality {name!r}; there are {', '.join(known) or 'none'}")
        find_part(name)
    for name, rule in asked.items():
        if rule.split(names) is None:
            detail = f"the collator makes something of {name!r}, which is not among them"
            raise ConfigError("arguments", "modalities", detail)
    if isinstance(collator, MultimodalCollator):
        for output in collator.outputs or names:
            if output in entries:
                detail = "is a name that every batch has: give the output another by a collator's rule with a source"
                raise ConfigError("arguments", output, detail)
    return names
