"""Views: samples by index and by many, selections, splits, SQL conditions, and views in other processes."""

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Dataset
from mm_assets.dataset import selection as views
from mm_assets.errors import ConfigError, FormatError, SchemaMismatchError
from mm_assets.fields import (
    FIELD_TYPES,
    BytesField,
    ImageField,
    NDArrayField,
    ScalarField,
    TextField,
)
from mm_assets.testing import same

from .shards import COUNT, FORMS, SIZE, sample, write


def labels(dataset: Dataset) -> list[int]:
    """Which samples a dataset has, by their ids."""
    return [int(sample_id[2:]) for sample_id in dataset.sample_ids]


# --- many samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which",
    [
        [3, -1, 3, 0],
        (22, 1),
        np.array([9, 8], np.uint8),
        range(20, 2, -7),
        slice(None, None, 6),
        slice(-3, None),
        [],
        np.arange(COUNT) % 9 == 2,
    ],
)
def test_many_samples_are_what_single_ones_are(data: Dataset, which: Any) -> None:
    """Lists, arrays, ranges, slices and masks of indices give the samples that single indices give."""
    rows = which if isinstance(which, slice) else np.asarray(which, getattr(which, "dtype", np.int64))
    expected = [data[int(i)] for i in np.arange(COUNT)[rows]]
    assert same(data[which], expected)
    assert same(list(data.select(which)), expected)


def test_a_single_index_may_be_any_integer(data: Dataset) -> None:
    """NumPy's integers and arrays of no dimension are single indices, as Python's are."""
    assert data[np.int64(2)]["label"] == data[np.array(2)]["label"] == data[2]["label"] == -8


@pytest.mark.parametrize(
    "which", [[COUNT], [-COUNT - 1], np.array([0.5]), "ab", [[0]], [True, False], np.ones(3, bool)]
)
def test_an_invalid_index_is_refused(data: Dataset, which: Any) -> None:
    """Indices out of range, of other types or dimensions, and masks of another length are errors."""
    with pytest.raises((IndexError, TypeError)):
        data[which]
    with pytest.raises((IndexError, TypeError)):
        data.select(which)


def test_samples_of_some_modalities(data: Dataset) -> None:
    """Samples of a view have only its modalities; of none they are empty dicts."""
    expected = [{"photo": data[i]["photo"], "text": data[i]["text"]} for i in (5, 6, 7)]
    assert same(data.select_modalities(["photo", "text"])[[5, 6, 7]], expected)
    assert data.select_modalities([])[[1, 2]] == [{}, {}]


def test_each_payload_of_a_batch_is_decoded_once(data: Dataset) -> None:
    """Torch's batched fetch decodes every value once, with one request for all modalities of a file."""
    with (
        mock.patch.object(TextField, "decode", autospec=True, side_effect=TextField.decode) as decode,
        mock.patch.object(ImageField, "decode", autospec=True, side_effect=ImageField.decode) as image,
    ):
        found = data.select_modalities(["text", "photo"]).__getitems__([0, 1, 2])
    assert decode.call_count == sum(one["text"] is not None for one in found)
    assert image.call_count == sum(one["photo"] is not None for one in found)


# --- selections -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-COUNT, COUNT - 1), max_size=30), st.data())
def test_a_view_is_a_dataset(paths: list[str], chosen: list[int], draw: st.DataObject) -> None:
    """A selection, and one of a selection, reads as the samples that it names: singly, in batches, by id, pickled."""
    with mm_assets.open(paths) as data:
        whole = np.arange(COUNT)
        outer = data.select(chosen)
        inner_indices = draw.draw(st.lists(st.integers(-len(chosen), len(chosen) - 1), max_size=8)) if chosen else []
        inner = outer.select(inner_indices)
        for view, rows in (
            (outer, whole[chosen]),
            (inner, whole[chosen][inner_indices] if inner_indices else whole[:0]),
        ):
            assert len(view) == len(rows)
            assert labels(view) == rows.tolist()
            assert view.selection is not None
            assert view.selection.dtype == np.int64
            assert view.selection.tolist() == rows.tolist()
            assert view.names == data.names
            assert same(list(view), [data[int(i)] for i in rows])
            assert view.presence("text").tolist() == data.presence("text")[rows].tolist()
            for threads in (0, 2):
                batch = view.read_batch(range(len(view)), threads=threads)
                assert same(batch, data.read_batch(rows, threads=threads))
            assert view.read_modality("label", range(len(view))) == data.read_modality("label", rows)
            assert view.read_raw(range(len(view)), ["photo"])["photo"] == data.read_raw(rows, ["photo"])["photo"]
            for i in range(COUNT):
                expected = rows.tolist().index(i) if i in rows else None
                assert view.find(f"id{i:03d}") == expected
            again = pickle.loads(pickle.dumps(view))
            with again:
                assert labels(again) == rows.tolist()
                assert same(again[:2], view[:2])


def test_a_selection_cannot_be_changed(data: Dataset) -> None:
    """A view keeps its own samples, whatever becomes of the array that chose them."""
    chosen = np.array([4, 5])
    view = data.select(chosen)
    chosen[:] = 0
    assert labels(view) == [4, 5]
    assert view.selection is not None
    with pytest.raises(ValueError, match="read-only"):
        view.selection[0] = 1
    assert data.selection is None
    assert repr(view).endswith(f"2 of {COUNT} samples)")


def test_a_view_has_its_own_modalities_and_settings(data: Dataset) -> None:
    """Chosen modalities, their order and changed settings stay through every further view and through pickling."""
    view = data.select_modalities(["text", "image"]).with_settings({"image": {"channels": 1}}).select([1, 0])
    for one in (view, pickle.loads(pickle.dumps(view)), view.split({"all": 1.0})["all"], view.filter("true")):
        assert one.names == ("text", "image")
        assert list(one.fields) == ["text", "image"]
        assert one[0]["image"].shape == (*SIZE, 1)
        assert list(one.read_batch([0])) == list(one[0]) == ["text", "image"]
        with pytest.raises(KeyError, match="label"):
            one.read_batch([0], ["label"])
    with pytest.raises(KeyError, match="nothing"):
        data.select_modalities(["nothing"])


def test_a_modality_that_is_not_chosen_is_not_touched(paths: list[str]) -> None:
    """A view of the text asks the files for the text only."""
    with mm_assets.open(paths[0]) as data:
        view = data.select_modalities(["text"])
        reader = type(view._files[0])
        with mock.patch.object(reader, "read_columns", autospec=True, side_effect=reader.read_columns) as read:
            view[[0, 1]]
        assert [tuple(call.args[2]) for call in read.call_args_list] == [("text",)]


def test_views_outlive_what_they_were_made_of(paths: list[str]) -> None:
    """Files are closed with the last dataset that reads them, whether that is a view or not."""
    data = mm_assets.open(paths)
    view = data.select([2])
    data.close()
    assert view[0]["label"] == -8
    with pytest.raises(ValueError, match="closed"):
        data[0]
    with pytest.raises(ValueError, match="closed"):
        data.select([0])
    nested = view.select([0])
    view.close()
    assert nested[0]["label"] == -8
    nested.close()
    with pytest.raises(ValueError, match="closed"):
        nested[0]


def test_errors_of_a_view_name_file_and_sample(tmp_path: Path) -> None:
    """A damaged payload is reported by its file and its index there, not by its index in the view."""
    paths = write(tmp_path, "mult", (3, 3))
    with mm_assets.open(paths) as data:
        raw = bytes(data.read_raw([4], ["photo"])["photo"][0] or b"")
    content = Path(paths[1]).read_bytes()
    assert content.count(raw) == 1
    Path(paths[1]).write_bytes(content.replace(raw, bytes(len(raw))))
    with mm_assets.open(paths) as data, mm_assets.open(paths, verify=False) as unverified:
        view = data.select([0, 4])
        for read in (
            lambda: view[1],
            lambda: view[[0, 1]],
            lambda: view.read_batch([0, 1]),
            lambda: view.with_settings({"photo": {"channels": 3}}).read_modality("photo", [1]),
        ):
            with pytest.raises(FormatError) as raised:
                read()
            assert (raised.value.path, raised.value.sample, raised.value.modality) == (paths[1], 1, "photo")
        assert unverified.select([0, 4]).to_arrow(raw=["photo"])["photo"][1].as_py() == bytes(len(raw))


# --- splits -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), unique=True, max_size=60),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
    st.randoms(),
)
def test_a_split_follows_from_the_ids(ids: list[str], shares: list[float], seed: int, random: Any) -> None:
    """Parts are disjoint and complete, and a sample's part is the same alone, in another order, and among others."""
    total = sum(shares)
    fractions = {str(k): share / total for k, share in enumerate(shares)}
    parts = views.split_rows(ids, len(ids), fractions, seed=seed)
    assert sorted(i for part in parts.values() for i in part.tolist()) == list(range(len(ids)))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts.values())
    names = {ids[i]: name for name, part in parts.items() for i in part.tolist()}
    other = [*ids[: len(ids) // 2], "more", "and more"]
    random.shuffle(other)
    again = views.split_rows(other, len(other), fractions, seed=seed)
    assert all(names.get(other[i], name) == name for name, part in again.items() for i in part.tolist())


def test_a_split_is_of_the_sizes_asked_and_independent_of_others() -> None:
    """Shares are met within chance for ids that differ in digits only, and two seeds part them independently."""
    ids = [f"{i:09d}" for i in range(20_000)]
    parts = views.split_rows(ids, len(ids), {"a": 0.7, "b": 0.2}, seed=0)
    assert abs(len(parts["a"]) - 14_000) < 4 * 65  # four standard deviations
    assert abs(len(parts["b"]) - 4_000) < 4 * 57
    other = views.split_rows(ids, len(ids), {"a": 0.7, "b": 0.2}, seed=1)
    assert abs(len(np.intersect1d(parts["a"], other["a"])) - 9_800) < 4 * 71


def test_the_rule_of_a_split_never_changes() -> None:
    """The parts of known ids are these in every release: a validation sample must not become one to train on."""
    ids = ["0", "1", "2", "a", "image-000001", "ü", ""]
    parts = views.split_rows(ids, len(ids), {"x": 0.5, "y": 0.5}, seed=3)
    assert parts["x"].tolist() == RULE


def by_the_documented_rule(sample_id: str, seed: int) -> int:
    """The mark of an id in Python's integers, as the docs tell it."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    base = 0x9E3779B97F4A7C15
    hashed = sum((byte + 1) * pow(base, i, 2**64) for i, byte in enumerate(sample_id.encode())) % 2**64
    return mix(hashed ^ mix((seed + base) % 2**64))


RULE = [
    i
    for i, sample_id in enumerate(["0", "1", "2", "a", "image-000001", "ü", ""])
    if by_the_documented_rule(sample_id, 3) < 2**63
]


def test_a_split_gives_views(data: Dataset) -> None:
    """Parts of a dataset, and of a view of it, hold the same samples."""
    parts = data.split({"train": 0.6, "val": 0.4}, seed=7)
    assert sorted(labels(parts["train"]) + labels(parts["val"])) == list(range(COUNT))
    view = data.select(range(COUNT - 1, 4, -1)).split({"train": 0.6, "val": 0.4}, seed=7)
    assert labels(view["val"]) == [i for i in reversed(labels(parts["val"])) if i > 4]


@pytest.mark.parametrize(
    ("fractions", "seed"),
    [
        ([0.5, 0.5], 0),
        ({}, 0),
        ({"a": 0.0}, 0),
        ({"a": -1}, 0),
        ({"a": 0.6, "b": 0.5}, 0),
        ({"a": float("nan")}, 0),
        ({"a": 1}, -1),
        ({"a": 1}, 2**64),
    ],
)
def test_a_wrong_split_is_refused(data: Dataset, fractions: Any, seed: int) -> None:
    """Shares that are none, or more than all together, and seeds out of range are configuration errors."""
    with pytest.raises(ConfigError, match=r"fractions|seed"):
        data.split(fractions, seed=seed)


# --- SQL --------------------------------------------------------------------------------------------------------------


CONDITIONS = {
    "photo.width >= 40 and text.num_code_points > 1": lambda i, s: (
        s["photo"] is not None and 20 + 2 * i >= 40 and s["text"] is not None and len(s["text"]) > 1
    ),
    "label.value between -5 and 3": lambda i, s: s["label"] is not None and -5 <= s["label"] <= 3,
    "not present_image": lambda i, s: s["image"] is None,
    "size_text = 2 * text.num_code_points -- a comment": lambda i, s: s["text"] is not None,
    "size_state is null or state.shape[1] > 2": lambda i, s: s["state"] is None,
    "state.dtype = '<f4' and state.num_dimensions = 2": lambda i, s: s["state"] is not None,
    "sample_id like 'id01%' or \"index\" = 3": lambda i, s: 10 <= i < 20 or i == 3,
    "IMAGE.Channels = 3 and tokens.num_tokens in (1, 3)": lambda i, s: (
        s["image"] is not None and s["tokens"] is not None and len(s["tokens"]) in (1, 3)
    ),
    "label is null": lambda i, s: s["label"] is None,
    "label.value": lambda i, s: bool(s["label"]),
    "photo.width > (select avg(photo.width) from samples)": lambda i, s: s["photo"] is not None and i > 11,
    "samples.photo['width'] = 24": lambda i, s: i == 2,
    "false": lambda i, s: False,
}


@pytest.mark.parametrize("sql", CONDITIONS)
@pytest.mark.parametrize("block", [5, 1 << 17])
def test_a_condition_chooses_by_metadata(data: Dataset, sql: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter gives the samples whose metadata fulfils it, in order, whatever blocks they are judged in."""
    monkeypatch.setattr(views, "_BLOCK_ROWS", block)
    assert labels(data.filter(sql)) == [i for i in range(COUNT) if CONDITIONS[sql](i, sample(i))]


def test_a_condition_on_a_view_sees_the_view(data: Dataset) -> None:
    """`index` counts in the view, samples keep the view's order and repeats, and a subquery sees these samples only."""
    view = data.select([20, 3, 3, 9, 1])
    assert labels(view.filter('"index" > 0')) == [3, 3, 9, 1]
    assert labels(view.filter("sample_id <> 'id009'").filter('"index" >= 1')) == [3, 3, 1]
    assert labels(view.filter("sample_id = (select max(sample_id) from samples)")) == [20]
    assert len(data.select([]).filter("photo.width > 1")) == 0


def test_a_condition_reads_no_more_than_it_names(data: Dataset) -> None:
    """Records of modalities that the condition does not name are not read, and no payload is."""
    reader = type(data._files[0])
    with (
        mock.patch.object(reader, "records", autospec=True, side_effect=reader.records) as records,
        mock.patch.object(reader, "read_columns", autospec=True, side_effect=reader.read_columns) as read,
    ):
        data.filter("text.num_code_points > 1 and size_photo > 0")
    assert {call.args[1] for call in records.call_args_list} == {"text"}
    assert not read.called


@pytest.mark.parametrize(
    "sql",
    [
        "photo.depth > 1",
        "nothing = 1",
        "photo.width >",
        "true); drop table samples; select (true",
        "",
        "photo.width = 'wide'",
        "exists (select 1 from read_csv('{path}'))",
        "exists (select 1 from '{path}')",
        "exists (select 1 from data)",
        "count(*) > 1",
    ],
)
def test_a_wrong_condition_is_refused(data: Dataset, sql: str, tmp_path: Path) -> None:
    """Unknown names, bad syntax, several statements, files and Python's variables are configuration errors."""
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match="sql"):
        data.filter(sql.format(path=tmp_path / "a.csv"))
    if "'wide'" not in sql:  # which only a value refuses
        with pytest.raises(ConfigError, match="sql"):
            data.select([]).filter(sql.format(path=tmp_path / "a.csv"))


def test_columns_that_sql_cannot_distinguish_are_refused(tmp_path: Path) -> None:
    """Names that differ in case, or are the table's own, are refused where a condition uses them, and only there."""
    number = ScalarField("int64")
    path = str(tmp_path / "a.mult")
    with mm_assets.create(path, {"A": number, "a": number, "index": number, "b c": number}) as writer:
        for i in range(4):
            writer.write(str(i), {"A": i, "a": -i, "index": 9, "b c": i})
    with mm_assets.open(path) as data:
        assert labels_of(data.filter('"b c".value > 1 and "present_b c"')) == ["2", "3"]
        for sql in ("A.value > 1", "present_a", '"index" > 1', "columns(*) is not null"):
            with pytest.raises(ConfigError, match="several columns"):
                data.filter(sql)
        assert labels_of(data.select_modalities(["A"]).filter("a.value = 3")) == ["3"]


def labels_of(dataset: Dataset) -> list[str]:
    return list(dataset.sample_ids)


@pytest.mark.parametrize("form", FORMS)
def test_every_field_has_its_record_in_the_table(tmp_path: Path, form: str) -> None:
    """A condition can name the entries of each field's record, whatever they are; padding is not among them."""
    for number, kind in FIELD_TYPES.items():
        try:
            field = kind()
        except (TypeError, ConfigError):
            continue  # it needs settings
        path = str(tmp_path / f"{number}.{form}")
        with mm_assets.create(path, {"m": field}) as writer:
            writer.write("0", {"m": None})
        names = [name for name in field.metadata_type.names or () if not name.startswith("_pad")]
        names = [name for name in names if field.metadata_type[name].kind != "V" or field.metadata_type[name].subdtype]
        with mm_assets.open(path) as data:
            assert len(data.filter(" and ".join(f'm."{name}" is null' for name in names) or "m is null")) == 1
            with pytest.raises(ConfigError):
                data.filter("m._pad is null")


def test_a_modality_of_an_unknown_type_has_presence_and_size(tmp_path: Path) -> None:
    """What cannot be decoded here can still be filtered by being there, and be had as bytes."""
    path = str(tmp_path / "a.mult")
    with mm_assets.create(path, {"m": BytesField(), "n": TextField()}) as writer:
        writer.write("0", {"m": b"abc", "n": "x"})
        writer.write("1", {"n": "y"})
    content = Path(path).read_bytes().replace(b"BytesField", b"OtherField")
    Path(path).write_bytes(content)
    with unchecked(), mm_assets.open(path) as data:
        assert list(data.fields) == ["n"]
        assert labels_of(data.filter("size_m = 3")) == ["0"]
        with pytest.raises(ConfigError, match="sql"):
            data.filter("m is null")
        with pytest.raises(SchemaMismatchError, match="read_raw"):
            data.to_arrow()
        assert data.to_arrow(raw=["m"]).to_pylist() == [{"m": b"abc", "n": "x"}, {"m": None, "n": "y"}]


def unchecked() -> Any:
    """Lets a file whose schema was patched be opened."""
    return mock.patch("mm_assets.formats.tail.crc32c", side_effect=lambda *_, **__: Anything())


class Anything:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


# --- processes --------------------------------------------------------------------------------------------------------


def ids_in_child(view: Dataset) -> tuple[int, list[str], Any]:
    return os.getpid(), list(view.sample_ids), view[0]["text"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_view_works_in_another_process(data: Dataset, start: str) -> None:
    """A view sent to a process, forked after it was used or fresh, reads the same samples there."""
    view = data.select([6, 2])
    expected = view[0]["text"]
    view.find("id002")
    with multiprocessing.get_context(start).Pool(1) as pool:
        child, ids, text = pool.apply(ids_in_child, (view,))
    assert child != os.getpid()
    assert (ids, text) == (["id006", "id002"], expected)


def as_they_are(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_takes_a_dataset_as_it_is(data: Dataset, workers: int) -> None:
    """A DataLoader draws shuffled batches of tensors from a view, here and in workers, and warns of nothing."""
    loading = pytest.importorskip("torch.utils.data")
    view = data.select_modalities(["label", "state", "text", "image"]).filter(
        "present_label and present_state and present_text and present_image"
    )
    drawn = {}
    for batch in loading.DataLoader(view, batch_size=3, shuffle=True, num_workers=workers):
        for label, state, text, image in zip(*(batch[name] for name in view.names), strict=True):
            drawn[int(label)] = (state.numpy(), text, image.numpy())
    expected = {one["label"]: (one["state"], one["text"], one["image"]) for one in view}
    assert same(sorted(drawn.items()), sorted(expected.items()))


def test_torch_takes_absent_values_with_another_collate(data: Dataset) -> None:
    """Where modalities are missing, a function that knows None makes the batch; samples come as they are."""
    loading = pytest.importorskip("torch.utils.data")
    loader = loading.DataLoader(data, batch_size=10, num_workers=2, collate_fn=as_they_are)
    assert same([one for batch in loader for one in batch], list(data))


def test_batches_for_torch_may_be_written_to(tmp_path: Path) -> None:
    """Arrays of a batched fetch are the caller's own, as those of single samples are."""
    path = str(tmp_path / "a.mult")
    with mm_assets.create(path, {"m": NDArrayField()}) as writer:
        writer.write("0", {"m": np.arange(3)})
    with mm_assets.open(path) as data:
        assert data[0]["m"].flags.writeable
        (fetched,) = data.__getitems__([0])
        assert same(fetched, data[0])
        assert fetched["m"].flags.writeable
