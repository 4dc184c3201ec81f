"""Windows over rows: a slow reference agrees with them for any groups, orders, offsets and edges."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import ConfigError, Dataset, FormatError, MultimodalLoader
from mm_assets.dataset.row_windows import RowWindows
from mm_assets.fields import ImageField, JSONField, NDArrayField, ScalarField, TextField, TokensField
from mm_assets.formats.reader import PackedReader
from mm_assets.testing import LoaderSuite
from mm_assets.testing.loaders import plain

from .samples import make_manifest

FIELDS = {
    "image": ImageField(encoding="png", size=(2, 3), channels=3),
    "state": NDArrayField("float32", (2,)),
    "free": NDArrayField(),
    "ids": TokensField(max_tokens=3),
    "text": TextField(),
    "episode": ScalarField("int64"),
    "step": ScalarField("int32"),
    "time": ScalarField("float64"),
    "meta": JSONField(),
}


class Step(NamedTuple):
    """A sample: its group, and its number in it."""

    episode: int
    step: int


def sample(row: int, step: Step) -> dict[str, Any]:
    """Sample `row`; some lack the state, and the free array has another shape in some."""
    return {
        "image": np.full((2, 3, 3), row % 256, np.uint8),
        "state": None if row % 5 == 3 else np.array([row, step.step], np.float32),
        "free": np.full(2 + (row % 4 == 0), row, np.int64),
        "ids": np.arange(row % 4),
        "text": f"row {row}",
        "episode": step.episode,
        "step": step.step,
        "time": step.step / 10,
        "meta": {"robot": {"episode": f"e{step.episode}"}, "step": step.step, "a.b": step.episode},
    }


def write(path: Path, steps: Sequence[Step], start: int = 0) -> Path:
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for row, step in enumerate(steps, start):
            writer.write(f"{step.episode}/{step.step:03d}", sample(row, step))
    return path


STEPS = [Step(episode, step) for episode, length in ((7, 6), (2, 1), (5, 9), (3, 4)) for step in range(length)]
SHUFFLED = [STEPS[row] for row in np.random.default_rng(3).permutation(len(STEPS))]
AT = {"image": [-1, 0], "state": [-2, 0, 1], "free": [0, 1], "text": [1, 1], "ids": [0, 3]}


@pytest.fixture(scope="module", params=["mult", "mstr"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files whose steps are in no order."""
    folder = tmp_path_factory.mktemp("steps")
    for number, start in enumerate(range(0, len(SHUFFLED), 8)):
        write(folder / f"{number}.{request.param}", SHUFFLED[start : start + 8], start)
    return folder


@pytest.fixture
def data(folder: Path) -> Iterator[Dataset]:
    with mm_assets.open(folder) as data:
        yield data


# --- the reference ----------------------------------------------------------------------------------------------------


def expected(data: Dataset, rows: Sequence[Step], row: int, offsets: Sequence[int], name: str, edge: str) -> Any:
    """The window of a modality and its mask, by one look-up after the other."""
    group = sorted((k for k, step in enumerate(rows) if step.episode == rows[row].episode), key=lambda k: rows[k].step)
    values, mask = [], []
    for offset in offsets:
        place = group.index(row) + offset
        outside = not 0 <= place < len(group)
        step = group[min(max(place, 0), len(group) - 1)]
        value = None if outside and edge == "zero" else data.read_batch([step], [name])[name].values
        present = value is not None and bool(data.read_batch([step], [name])[name].present[0])
        values.append(value)
        mask.append(outside or not present)
    return values, mask


def check_item(data: Dataset, rows: Sequence[Step], item: dict[str, Any], row: int, at: Any, edge: str) -> None:
    for name, offsets in at.items():
        values, mask = expected(data, rows, row, offsets, name, edge)
        assert item[name + "_is_pad"].tolist() == mask, (name, row)
        for number, value in enumerate(values):
            if isinstance(item[name], dict):
                parts = {part: array[number] for part, array in item[name].items()}
                for part, array in parts.items():
                    assert (array == (0 if value is None else value[part][0])).all()
            elif value is None or value[0] is None:
                assert item[name][number] is None or not np.any(item[name][number])
            else:
                assert plain(item[name][number]) == plain(value[0])
    for name in set(data.names) - set(at):
        values = data.read_batch([row], [name])[name].values
        value = {part: array[0] for part, array in values.items()} if isinstance(values, dict) else values[0]
        is_present = data.presence(name)[row]
        assert plain(item[name]) == (plain(value) if is_present else None)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", ["repeat", "zero"])
def test_values_and_masks_are_those_of_the_reference(data: Dataset, edge: str) -> None:
    """Every item of shuffled steps in several files is what one look-up after the other finds."""
    windows = data.windows(AT, group="episode", order="step", edge=edge)
    assert len(windows) == len(data)
    for row, item in enumerate(windows):
        check_item(data, SHUFFLED, item, row, AT, edge)


@pytest.mark.nightly_examples(2000)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.none() | st.integers(0, 1000),
    gap=st.integers(1, 3),
    offsets=st.lists(st.integers(-7, 7), min_size=1, max_size=5),
    edge=st.sampled_from(["repeat", "zero", "drop"]),
    rows=st.data(),
)
def test_any_groups_orders_offsets_and_edges(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seed: int | None,
    gap: int,
    offsets: list[int],
    edge: str,
    rows: st.DataObject,
) -> None:
    """A batch of any items is that of the reference, and dropped windows are those that have a masked step."""
    steps = [Step(-group, gap * step) for group, length in enumerate(lengths) for step in range(length)]
    if seed is not None:
        np.random.default_rng(seed).shuffle(steps)
        steps = [Step(*map(int, step)) for step in steps]
    at = {"state": offsets, "text": offsets[::-1]}
    with mm_assets.open(write(tmp_path_factory.mktemp("any") / "a.mstr", steps)) as data:
        windows = data.windows(at, group="episode", order="step", edge=edge)
        kept = list(range(len(steps)))
        if edge == "drop":
            masks = {row: [expected(data, steps, row, at[name], name, edge)[1] for name in at] for row in kept}
            kept = [row for row in kept if not np.any(masks[row])]
        assert list(windows.sample_ids) == [data.sample_ids[row] for row in kept]
        if not kept:
            return
        chosen = rows.draw(st.lists(st.integers(0, len(kept) - 1), max_size=6))
        for item, k in zip(windows[chosen], chosen, strict=True):
            check_item(data, steps, item, kept[k], at, edge)


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=20, unique=True),
    offset=st.integers(-4, 4),
    tolerance=st.sampled_from([0.0, 0.05, 0.11, 0.2]),
    edge=st.sampled_from(["repeat", "zero", "drop"]),
    is_float=st.booleans(),
)
def test_offsets_in_seconds(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[tuple[int, int]],
    offset: int,
    tolerance: float,
    edge: str,
    is_float: bool,
) -> None:
    """With a tolerance a step is the nearest in time, also across gaps; none within the tolerance is masked."""
    steps = [Step(*number) for number in numbers]
    order, unit = ("time", 0.1) if is_float else ("step", 1)
    wanted = offset * unit
    limit = tolerance + 1e-9 if is_float else 10 * tolerance
    with mm_assets.open(write(tmp_path_factory.mktemp("times") / "a.mult", steps)) as data:
        times = np.array([step.step / 10 if is_float else step.step for step in steps])
        nearest = []
        for row, step in enumerate(steps):
            group = sorted((k for k, one in enumerate(steps) if one.episode == step.episode), key=lambda k: times[k])
            nearest.append(min(group, key=lambda k: abs(times[k] - (times[row] + wanted))))
        mask = np.abs(times[nearest] - (times + wanted)) > limit
        arguments: dict[str, Any] = {"group": "episode", "order": order, "tolerance": limit, "edge": edge}
        if mask.all():
            with pytest.raises(ConfigError, match=r"at\.text: no sample has a step at"):
                data.windows({"text": [wanted]}, **arguments)
            return
        windows = data.windows({"text": [wanted]}, **arguments)
        kept = [row for row in range(len(steps)) if edge != "drop" or not mask[row]]
        assert list(windows.sample_ids) == [data.sample_ids[row] for row in kept]
        for item, row in zip(windows, kept, strict=True):
            assert item["text_is_pad"].tolist() == [mask[row]]
            # Of two steps that are as near, rounding decides.
            far = abs(times[nearest[row]] - (times[row] + wanted))
            text = None if mask[row] and edge == "zero" else item["text"][0]
            if text is None:
                assert item["text"] == [None]
            else:
                found = times[int(text.removeprefix("row "))]
                assert abs(found - (times[row] + wanted)) == pytest.approx(far)


def test_columns_of_all_kinds_name_groups_and_orders(data: Dataset) -> None:
    """Metadata records, keys of JSON, ids, texts and values of the caller give the same windows."""
    episodes, steps = [step.episode for step in SHUFFLED], [step.step for step in SHUFFLED]
    at = {"state": [-1, 0], "text": [0, 1]}
    expected = [plain(item) for item in data.windows(at, group="episode", order="step")]
    columns: list[tuple[Any, Any]] = [
        ("episode.value", "step.value"),
        ("meta.robot.episode", "meta.step"),
        ("meta.a.b", "time"),
        ("sample_id", "sample_id"),
        (episodes, steps),
        (np.array(episodes), np.array(steps, np.float32)),
        (np.array(list(map(str, episodes))), list(np.array(steps, np.int16))),
    ]
    for group, order in columns:
        assert [plain(item) for item in data.windows(at, group=group, order=order)] == expected
    by_text = data.windows({"state": [-1, 0]}, group="text")
    assert by_text[3]["state_is_pad"].tolist() == [True, bool(3 % 5 == 3)]
    assert len(by_text.groups) == len(data)


def test_without_an_order_steps_are_as_in_the_dataset(tmp_path: Path) -> None:
    """The order of the dataset counts, and an index over samples in that order takes no memory for each."""
    with mm_assets.open(write(tmp_path / "a.mult", STEPS)) as data:
        windows = data.windows({"text": [-1, 1]}, group="episode")
        assert windows[7]["text"] == ["row 7", "row 8"]
        assert windows[7]["text_is_pad"].tolist() == [True, False]
        assert windows.groups.rows is None
        assert windows.groups.names == [7, 2, 5, 3]


def test_repeated_steps_share_no_memory(data: Dataset) -> None:
    """Writing to one value of a batch changes no other, in arrays and in lists."""
    windows = data.windows({"free": [0, 0], "image": [0, 0]}, group="episode", order="step")
    first, second = windows[[0, 0]]
    for name in ("free", "image"):
        first[name][0][:] = 99
        for other in (first[name][1], second[name][0], windows[0][name][0]):
            assert not (other == 99).any()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_each_payload_is_decoded_once(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of overlapping windows decodes a step of a modality once, and of a zeroed edge none."""
    decoded: list[int] = []
    decode_batch = ImageField.decode_batch

    def count(self: ImageField, records: Any, datas: Any, out: Any = None) -> Any:
        decoded.append(len(datas))
        return decode_batch(self, records, datas, out)

    monkeypatch.setattr(ImageField, "decode_batch", count)
    for edge in ("repeat", "zero"):
        windows = data.windows({"image": range(-3, 4)}, group="episode", order="step", edge=edge)
        windows.read_batch(range(len(data)), ["image", "image_is_pad"])
        last = [row for row, step in enumerate(SHUFFLED) if step == Step(7, 5)]
        windows.read_batch(last, ["image"])
    assert decoded == [len(data), 4, len(data), 4]


def test_a_remote_batch_is_one_request_to_each_file(
    folder: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remote files give the same batches, and the windows of all modalities are one request to each file."""
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/windows/{path.name}", path.read_bytes())
    fetches: list[str] = []
    fetch = PackedReader._fetch

    def count(self: PackedReader, *arguments: Any) -> Any:
        fetches.append(self.path)
        return fetch(self, *arguments)

    try:
        with mm_assets.open("memory://windows") as remote:
            pair = [one.windows(AT, group="episode", order="step") for one in (data, remote)]
            for windows in pair:
                windows.read_batch([0])  # which reads tables too
            monkeypatch.setattr(PackedReader, "_fetch", count)
            local, far = (windows.read_batch([19, 3, 3, 8]) for windows in pair)
            assert sorted(fetches) == sorted({*fetches})
            assert {name: plain(batch._asdict()) for name, batch in far.items()} == {
                name: plain(batch._asdict()) for name, batch in local.items()
            }
    finally:
        memory.rm("/windows", recursive=True)


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_a_manifest_and_its_streams_are_read_in_windows(tmp_path: Path, form: str) -> None:
    """Samples of several partitions are one group, and an added stream is a modality like the others."""
    manifest = make_manifest(tmp_path / "data", [3, 0, 4], streams={"caption": TextField()})
    with mm_assets.open(manifest, format=form) as data:
        windows = data.windows({"caption": [-1, 1], "label": [0, 1]}, group=[0] * 7, order="meta.i")
        item = windows[2]
        assert item["caption"] == ["caption 1", "caption 3"]
        assert item["label"].tolist() == [-3, 0]
        assert item["label_is_pad"].tolist() == [False, True]  # the fourth sample has none
        loader = MultimodalLoader(windows, ["caption", "label"], batch_size=4, shuffle=False)
        assert [batch["caption"][0] for batch in loader] == [["caption 0", "caption 1"], ["caption 3", "caption 5"]]


def test_each_modality_may_have_indices_of_its_own(data: Dataset) -> None:
    """One call reads other samples of each modality, in the order given, and is the same as a call for each."""
    indices: dict[str, list[int]] = {"state": [19, 0, 0, -1], "text": [5], "image": []}
    batch = data.read_batch_each(indices)
    assert list(batch) == list(indices)
    for name, own in indices.items():
        assert plain(batch[name]._asdict()) == plain(data.read_batch(own, [name])[name]._asdict())
    assert data.read_batch_each({}) == {}
    with pytest.raises(IndexError, match="index 20 is out of range for 20 samples"):
        data.read_batch_each({"state": [0], "text": [20]})
    with pytest.raises(ValueError, match="out has 'state', which is not read: text"):
        data.read_batch_each({"text": [0]}, out={"state": np.zeros((1, 2))})
    with pytest.raises(KeyError, match="no modality 'texts'"):
        data.read_batch_each({"texts": [0]})


def test_batches_are_written_to_arrays_of_the_caller(data: Dataset) -> None:
    """The layout says the shapes, and a batch in arrays of that layout is the same as one in new arrays."""
    windows = data.windows(AT, group="episode", order="step")
    layout = windows.batch_layout(5)
    assert layout["image"].shape == (5, 2, 2, 3, 3)
    assert layout["state_is_pad"].shape == (5, 3)
    assert {"free", "text", "meta"}.isdisjoint(layout)
    out = {
        name: {part: np.full(one.shape, 1, one.dtype) for part, one in spec.items()}
        if isinstance(spec, dict)
        else np.full(spec.shape, 1, spec.dtype)
        for name, spec in layout.items()
    }
    batch = windows.read_batch([4, 1, 4], out=out, threads=2)
    assert all(np.shares_memory(batch[name].values, out[name]) for name in ("image", "state", "step", "state_is_pad"))
    expected = windows.read_batch([4, 1, 4])
    assert {name: plain(one._asdict()) for name, one in batch.items()} == {
        name: plain(one._asdict()) for name, one in expected.items()
    }
    with pytest.raises(ValueError, match=r"out\['state'\] is array of float32 with shape \(5, 2\)"):
        windows.read_batch([0], ["state"], out={"state": np.zeros((5, 2), np.float32)})
    with pytest.raises(ValueError, match="out has 'text', which is not read"):
        windows.read_batch([0], ["state"], out={"text": np.zeros(3)})


def test_a_damaged_step_names_itself(tmp_path: Path) -> None:
    """Each window over a damaged step raises, with the step's place; windows without it are read."""
    path = write(tmp_path / "a.mult", STEPS)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 3", b"row X"))
    with mm_assets.open(path) as data:
        windows = data.windows({"text": [0, 1]}, group="episode", order="step")
        assert windows[4]["text"] == ["row 4", "row 5"]
        for item in (2, 3):
            with pytest.raises(FormatError, match=r"a\.mult, sample 3, modality 'text'"):
                windows[item]


# --- views ------------------------------------------------------------------------------------------------------------


def test_selected_windows_have_all_steps_of_their_groups(data: Dataset) -> None:
    """Views select windows, not the steps in them; of masks and modalities only the named ones are read."""
    windows = data.windows(AT, group="episode", order="step")
    items = [plain(item) for item in windows]
    assert [plain(item) for item in windows.select([5, -1, 5])] == [items[5], items[-1], items[5]]
    assert [plain(item) for item in windows[2:9:3]] == items[2:9:3]
    mask = np.arange(len(data)) % 2 == 1
    assert [plain(item) for item in windows.select(mask).select(slice(3))] == items[1:6:2]
    found = windows.filter("step.value = 0 and episode.value > 2")
    assert [plain(item) for item in found] == [
        items[row] for row, step in enumerate(SHUFFLED) if step.step == 0 and step.episode > 2
    ]
    two = windows.select_modalities(["text", "state_is_pad"])
    assert two.names == ("text", "state_is_pad")
    assert plain(two[7]) == {name: items[7][name] for name in two.names}
    again = pickle.loads(pickle.dumps(windows.select([4])))
    assert plain(again[0]) == items[4]
    small = windows.with_settings({"image": {"channels": 1}})
    assert small[0]["image"].shape == (2, 2, 3, 1)
    for view in (found, two, again, small, windows):
        view.close()
    assert len(data[0]) == len(FIELDS)
    with pytest.raises(ValueError, match="is closed"):
        windows[0]


def test_a_split_has_whole_groups(data: Dataset) -> None:
    """No group is in two parts, whatever was selected before, and a group's part depends on its name alone."""
    windows = data.windows({"text": [0, 1]}, group="episode", order="step")
    for view in (windows, windows.select(range(0, len(data), 2))):
        parts = view.split({"train": 0.5, "val": 0.5}, seed=2)
        episodes = [{item["episode"].item() for item in part} for part in parts.values()]
        assert all(episodes)
        assert not episodes[0] & episodes[1]
        assert sum(map(len, parts.values())) == len(view)
    named = data.windows({"text": [0]}, group=[str(step.episode) for step in SHUFFLED]).split({"train": 0.5}, seed=2)
    assert list(named["train"].sample_ids) == list(windows.split({"train": 0.5}, seed=2)["train"].sample_ids)


# --- loading ----------------------------------------------------------------------------------------------------------


class TestLoader(LoaderSuite):
    """A loader of windows."""

    @pytest.fixture(autouse=True)
    def _windows(self, tmp_path: Path) -> Iterator[None]:
        with mm_assets.open(write(tmp_path / "a.mstr", SHUFFLED)) as data:
            self.windows = data.windows(AT, group="episode", order="step")
            yield

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        return MultimodalLoader(
            self.windows, batch_size=3, seed=seed, num_workers=num_workers, rank=rank, world_size=world_size
        )


def test_steps_of_a_window_have_one_random_crop(tmp_path: Path) -> None:
    """A loader draws a crop for each window and epoch, the same for all of its steps, also if windows share them."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    with mm_assets.create(tmp_path / "a.mult", {"image": ImageField(encoding="png")}) as writer:
        for step in range(6):
            writer.write(f"0/{step}", {"image": noise})
    with mm_assets.open(tmp_path / "a.mult") as data:
        cropped = data.with_settings({"image": {"decode_size": [8, 8], "channels": 3, "decode_crop": {}}})
        windows = cropped.windows({"image": [0, 1, 2]}, group="sample_id", order="sample_id")
        loader = MultimodalLoader(windows, batch_size=6, seed=1)
        epochs = [next(iter(loader))["image"] for _ in range(2)]
        for images in epochs:
            assert (images == images[:, :1]).all()  # the stored images are equal
            assert len({image.tobytes() for image in images[:, 0]}) == 6
        assert not {image.tobytes() for image in epochs[0]} & {image.tobytes() for image in epochs[1]}
        resumed = MultimodalLoader(windows, batch_size=6, seed=1, num_workers=0)
        np.testing.assert_array_equal(next(iter(resumed))["image"], epochs[0])


def test_windows_are_mixed_with_other_data(data: Dataset) -> None:
    """A mix takes windows as a source, and a state resumes on other offsets, but not on other windows."""
    arguments: dict[str, Any] = {"group": "episode", "order": "step"}
    windows = data.windows({"state": [0, 1]}, **arguments)
    mixed = mm_assets.mix({"windows": (windows, 1), "steps": (data, 1)}, batch_size=4, seed=1)
    shapes = {batch["source"]: batch["state"].shape for batch in mixed}
    assert shapes == {"windows": (4, 2, 2), "steps": (4, 2)}
    loader = MultimodalLoader(windows, ["state", "state_is_pad"], batch_size=4)
    next(iter(loader))
    MultimodalLoader(data.windows({"text": [3]}, **arguments)).load_state_dict(loader.state_dict())
    with pytest.raises(mm_assets.LoaderError, match="another dataset"):
        MultimodalLoader(windows.select(range(len(data))[::-1])).load_state_dict(loader.state_dict())


def test_torch_reads_windows(tmp_path: Path) -> None:
    """Torch's DataLoader collates windows and masks, in workers too."""
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    with mm_assets.open(write(tmp_path / "a.mult", STEPS)) as data:
        windows: RowWindows = data.windows({"image": [-1, 0], "state": [0, 1]}, group="episode", order="step")
        windows = windows.select_modalities(["image", "state", "state_is_pad", "step"])
        for num_workers in (0, 1):
            batches = list(DataLoader(windows, batch_size=8, num_workers=num_workers))
            assert batches[0]["image"].shape == (8, 2, 2, 3, 3)
            assert batches[0]["state_is_pad"][5].tolist() == [False, True]
            assert batches[0]["step"].tolist() == [step.step for step in STEPS[:8]]


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "epsode"}, r"group: found 'epsode', expected one of sample_id, .*episode, step, time, meta\.step"),
        ({"group": "episode.x"}, r"group: found 'episode\.x', expected one of sample_id"),
        ({"group": "meta.robot.id"}, r"group: sample 0: no 'robot\.id' in 'meta': it has episode"),
        ({"group": "meta.step.id"}, r"group: sample 0: no 'step\.id' in 'meta': int"),
        ({"group": "meta.robot"}, r"group: sample 0: 'robot' in 'meta' is dict of length 1, expected a number or text"),
        ({"group": "time"}, r"group: sample 0 has float .*, expected an integer or text"),
        ({"group": [1, 2]}, r"group: found list of length 2, expected one value of 20 samples"),
        ({"group": np.zeros((20, 2))}, r"group: found array .*, expected one value of 20 samples"),
        ({"group": [None] * 20}, r"group: sample 0 has NoneType None, expected an integer or text"),
        ({"order": "text"}, r"order: sample 0 has str .*, expected a number"),
        ({"order": [0] * 20}, r"order: samples \d+ and \d+ of group \d both have 0, expected each value once"),
        ({"order": [0.5] * 19 + [np.nan]}, r"order: sample 19 has nan, expected a finite number"),
        ({"order": [*range(19), 2**62]}, r"order: sample 19 has 4611686018427387904, expected a finite number"),
        ({"order": [*range(19), 2**99]}, r"order: found integers beyond"),
        ({"order": [True] * 20}, r"order: sample 0 has bool True, expected a number"),
        ({"edge": "wrap"}, r"edge: found 'wrap', expected one of repeat, zero, drop"),
        ({"tolerance": -1}, r"tolerance: found -1, expected a number from 0"),
        ({"tolerance": 0.1, "order": None}, r"tolerance: needs an order"),
        ({"at": {"text": [0.5]}}, r"at\.text: found \[0\.5\], expected a list of integers, which count steps"),
        ({"at": {"text": []}}, r"at\.text: found \[\], expected a list of integers"),
        ({"at": {"text": [[1]]}}, r"at\.text: found \[\[1\]\], expected a list of integers"),
        ({"at": {"text": [np.inf]}, "tolerance": 1}, r"at\.text: found \[inf\], expected a list of finite numbers"),
        ({"at": {"text": [0.5]}, "tolerance": 0.1}, r"no sample has a step at 0\.5 from it .* 1 apart \(median\)"),
    ],
)
def test_wrong_arguments_say_what_there_is(data: Dataset, arguments: dict[str, Any], message: str) -> None:
    """Columns that do not exist or that have other values, and wrong offsets, are errors that name the argument."""
    with pytest.raises(ConfigError, match=message):
        data.windows(**{"at": {"text": [0, 1]}, "group": "episode", "order": "step", **arguments})


def test_samples_without_a_group_are_named(data: Dataset, tmp_path: Path) -> None:
    """A sample that lacks its group, an id without a number, and an unknown modality say what to do."""
    with pytest.raises(KeyError, match="no modality 'images'; there are image, state"):
        data.windows({"images": [0]}, group="episode")
    fields = {"group": ScalarField("int8"), "a": TextField(), "a_is_pad": TextField()}
    with mm_assets.create(tmp_path / "a.mult", fields) as writer:
        writer.write("a1", {"group": 1, "a": "", "a_is_pad": ""})
        writer.write("b", {"group": None, "a": "", "a_is_pad": ""})
    with mm_assets.open(tmp_path / "a.mult") as bare:
        with pytest.raises(ConfigError, match=r"sample 1 has no 'group'.*filter\('present_group'\)"):
            bare.windows({"group": [0]}, group="group")
        with pytest.raises(ConfigError, match="found the id 'b', expected ids that end with a number"):
            bare.windows({"group": [0]}, group="sample_id")
        with pytest.raises(ConfigError, match=r"at\.a: there is a modality 'a_is_pad'"):
            bare.windows({"a": [0]}, group=["a", "b"])
        windows = bare.filter("present_group").windows({"group": [0, 1]}, group="group")
        assert windows[0]["group"].tolist() == [1, 1]
        for wrong, error in ((1, IndexError), (-2, IndexError), ([True, False], TypeError)):
            with pytest.raises(error):
                windows[wrong]
        with pytest.raises(IndexError, match="a mask of 2 for 1 windows"):
            windows.select(np.array([True, False]))
        with pytest.raises(TypeError, match="modalities: found 'group', expected a list of names"):
            windows.read_batch([0], "group")
        with pytest.raises(KeyError, match="no modality 'x'; it has group, a, a_is_pad, group_is_pad"):
            windows.select_modalities(["x"])
