"""Writes samples with the library that owns a format, and reads exports with it.

Run by the Python of an environment of `requirements.txt` or `requirements-lerobot.txt`, which lack this project::

    python owners.py write FORMAT SHARD FOLDER    the samples of a tar, to a folder
    python owners.py read FORMAT FOLDER           the samples of a folder, as JSON
    python owners.py versions PACKAGE             the versions of packages, as JSON

Several pairs of SHARD and FOLDER, or several folders, are done by one process. A sample that is read is its key and, by
suffix, the digest of each member: of its bytes, of the dtype, shape and numbers of an array, and of what is decoded,
pixels or audio samples. An episode of LeRobot is its task, the digests of its arrays, and thumbnails of its frames.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import platform
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Sample = Mapping[str, Any]  # by suffix; the key is "__key__"

SHARD_BYTES = 200_000  # so that exports of the demo shards and what owners write have several shards
IMAGES = frozenset({"png", "jpg", "jpeg", "tiff"})
AUDIO = frozenset({"wav", "flac"})
TEXTS = frozenset({"txt", "json"})
THUMBNAIL_PIXELS = 32  # along the longer side, at least
DELTA_STEP = 10  # frames from one to the next that is read with the frame before it


# -- digests


def digest(data: Any) -> str:
    """Returns the start of the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def describe(suffix: str, content: Any, decoded: Any = None) -> list[Any]:
    """Returns the digests of a member: of its content, and of what is decoded from it.

    Args:
        suffix: of its name; the extension decides what is decoded.
        content: bytes, text, or an array.
        decoded: a picture or samples that the owner's library has decoded; None decodes the content.
    """
    extension = suffix.rpartition(".")[2].lower()
    if isinstance(content, str):
        content = content.encode()
    if extension == "npy":
        array = content if isinstance(content, np.ndarray) else np.load(io.BytesIO(content))
        return [f"{array.dtype.str}{list(array.shape)}", digest(np.ascontiguousarray(array).tobytes())]
    return [digest(content), decoded_digest(extension, content, decoded)]


def decoded_digest(extension: str, content: bytes, decoded: Any) -> str | None:
    """Returns the digest of pixels as RGBA, or of samples of audio as float32."""
    if extension in IMAGES:
        from PIL import Image

        image = Image.open(io.BytesIO(content)) if decoded is None else decoded
        return f"{image.size} {digest(image.convert('RGBA').tobytes())}"
    if extension in AUDIO:
        import soundfile

        samples = soundfile.read(io.BytesIO(content), dtype="float32")[0] if decoded is None else decoded
        return f"{np.shape(samples)} {digest(np.ascontiguousarray(samples, np.float32).tobytes())}"
    return None


# -- samples of a tar, which this file reads with the standard library alone


def samples_of(shard: Path) -> Iterator[dict[str, Any]]:
    """Yields the samples of a tar whose members follow each other."""
    sample: dict[str, Any] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            folder, slash, name = member.name.rpartition("/")
            base, _, suffix = name.partition(".")
            file = tar.extractfile(member)
            assert file is not None, member.name
            if sample.get("__key__") != (key := folder + slash + base):
                if sample:
                    yield sample
                sample = {"__key__": key}
            sample[suffix] = file.read()
    if sample:
        yield sample


def suffixes_of(samples: Iterable[Sample]) -> list[str]:
    """Returns the suffixes of all samples, sorted as the members of each are."""
    return sorted({suffix for sample in samples for suffix in sample if suffix != "__key__"})


def members_of(sample: Sample, names: Mapping[str, str]) -> str:
    """Returns the text of a column `__members__`; the JSON has a column that is always named so."""
    return json.dumps([[names[suffix], suffix] for suffix in sample if suffix not in ("__key__", "json")])


# -- writers


def write_webdataset(samples: list[Sample], folder: Path) -> None:
    """Writes tars."""
    from webdataset import ShardWriter

    with ShardWriter(f"file:{folder}/shard-%06d.tar", maxsize=SHARD_BYTES, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def write_energon(samples: list[Sample], folder: Path) -> None:
    """Writes tars, and prepares them."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    write_webdataset(samples, folder)
    names = sorted(path.name for path in folder.glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_patterns=[("train", ".*")], workers=1)


def write_zip(samples: list[Sample], folder: Path) -> None:
    """Writes a ZIP archive."""
    with zipfile.ZipFile(folder / "shard-000000.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for sample in samples:
            for suffix in suffixes_of([sample]):
                archive.writestr(f"{sample['__key__']}.{suffix}", sample[suffix])


def write_folder(samples: list[Sample], folder: Path) -> None:
    """Writes plain files."""
    for sample in samples:
        for suffix in suffixes_of([sample]):
            path = folder / f"{sample['__key__']}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample[suffix])


def typed_value(suffix: str, content: bytes | None, samples: list[Sample]) -> Any:
    """Returns a member as the text or array that it is; if the sample lacks it, an empty text or another's array."""
    extension = suffix.rpartition(".")[2]
    if extension == "npy":  # LitData takes the type of numbers from the first sample
        return np.load(io.BytesIO(content or next(one[suffix] for one in samples if suffix in one)))
    if extension in TEXTS:
        return "" if content is None else content.decode()
    return b"" if content is None else content


def typed_row(sample: Sample, suffixes: list[str], samples: list[Sample]) -> dict[str, Any]:
    """Returns a row of a format without null, in which `__members__` lists what is there."""
    values = {suffix: typed_value(suffix, sample.get(suffix), samples) for suffix in suffixes}
    return {
        "__key__": sample["__key__"],
        "__members__": members_of(sample, {name: name for name in suffixes}),
        **values,
    }


def write_mds(samples: list[Sample], folder: Path) -> None:
    """Writes MDS shards: texts, arrays, and bytes."""
    from streaming import MDSWriter

    suffixes = suffixes_of(samples)
    kinds = {"npy": "ndarray", "txt": "str", "json": "str"}
    columns = {suffix: kinds.get(suffix.rpartition(".")[2], "bytes") for suffix in suffixes}
    columns = {"__key__": "str", "__members__": "str", **columns}
    with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
        for sample in samples:
            writer.write(typed_row(sample, suffixes, samples))


class Rows:
    """Returns the row of a number, in the processes of LitData."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __call__(self, number: int) -> dict[str, Any]:
        """Returns a row."""
        return self._rows[number]


def write_litdata(samples: list[Sample], folder: Path) -> None:
    """Writes chunks: texts, arrays, and bytes; at most ten, since they are packed in the order of their names."""
    import litdata

    suffixes = suffixes_of(samples)
    rows = Rows([typed_row(sample, suffixes, samples) for sample in samples])
    litdata.optimize(
        fn=rows, inputs=list(range(len(samples))), output_dir=str(folder), chunk_bytes=5 * SHARD_BYTES, num_workers=1
    )


def write_hf(samples: list[Sample], folder: Path) -> None:
    """Writes Parquet files with features."""
    dataset = huggingface_dataset(samples)
    number = 2 if len(dataset) > 1 else 1
    (folder / "data").mkdir()
    for index in range(number):
        part = dataset.shard(number, index, contiguous=True)
        part.to_parquet(folder / "data" / f"train-{index:05d}-of-{number:05d}.parquet")


def write_arrow(samples: list[Sample], folder: Path) -> None:
    """Writes what `save_to_disk` does."""
    huggingface_dataset(samples).save_to_disk(str(folder), num_shards=min(2, len(samples)))


def huggingface_dataset(samples: list[Sample]) -> Any:
    """Returns the samples as a dataset with features."""
    import datasets

    features: dict[str, Any] = {"__key__": datasets.Value("string")}
    for suffix in suffixes_of(samples):
        extension = suffix.rpartition(".")[2]
        if extension in TEXTS:
            features[suffix] = datasets.Value("string")
        elif extension in IMAGES:
            features[suffix] = datasets.Image(decode=False)
        else:
            features[suffix] = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    rows = []
    for sample in samples:
        row: dict[str, Any] = {"__key__": sample["__key__"]}
        for suffix in features:
            content = sample.get(suffix)
            if suffix == "__key__" or content is None:
                row.setdefault(suffix, None)
            elif suffix.rpartition(".")[2] in TEXTS:
                row[suffix] = content.decode()
            else:
                row[suffix] = {"bytes": content, "path": f"{sample['__key__'].rpartition('/')[2]}.{suffix}"}
        rows.append(row)
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def arrow_table(samples: list[Sample], names: Mapping[str, str]) -> Any:
    """Returns a table of texts and bytes."""
    import pyarrow as pa

    columns = {"__key__": pa.array([sample["__key__"] for sample in samples])}
    for suffix, name in names.items():
        contents = [sample.get(suffix) for sample in samples]
        if suffix.rpartition(".")[2] in TEXTS:
            columns[name] = pa.array([None if one is None else one.decode() for one in contents], pa.string())
        else:
            columns[name] = pa.array(contents, pa.large_binary())
    return pa.table(columns)


def write_parquet(samples: list[Sample], folder: Path) -> None:
    """Writes Parquet files whose columns are named by suffixes."""
    import pyarrow.parquet as pq

    table = arrow_table(samples, {suffix: suffix for suffix in suffixes_of(samples)})
    half = -(-len(samples) // 2)
    for number, start in enumerate(range(0, len(samples), half)):
        pq.write_table(table.slice(start, half), folder / f"part-{number:05d}.parquet")


def write_lance(samples: list[Sample], folder: Path) -> None:
    """Writes a fragment; names of columns have no dots, so that `__members__` has the suffixes.

    Several fragments would be packed in the order of their names, which are random.
    """
    import lance
    import pyarrow as pa

    names = {suffix: suffix.replace(".", "_") for suffix in suffixes_of(samples)}
    table = arrow_table(samples, names)
    table = table.append_column("__members__", pa.array([members_of(sample, names) for sample in samples]))
    lance.write_dataset(table, str(folder))


# -- readers


Described = tuple[str, dict[str, list[Any]]]


def read_webdataset(folder: Path) -> Iterator[Described]:
    """Yields the samples of tars, with pictures as WebDataset decodes them."""
    import webdataset

    shards = [f"file:{path}" for path in sorted(folder.glob("*.tar"))]
    plain = webdataset.WebDataset(shards, shardshuffle=False)
    decoded = webdataset.WebDataset(shards, shardshuffle=False).decode("pilrgba")
    for sample, pictures in zip(plain, decoded, strict=True):
        yield (
            sample["__key__"],
            {
                suffix: describe(suffix, content, pictures[suffix] if hasattr(pictures[suffix], "convert") else None)
                for suffix, content in sample.items()
                if not suffix.startswith("__")
            },
        )


def read_energon(folder: Path) -> Iterator[Described]:
    """Yields the samples of a prepared folder, once."""
    from megatron.energon import WorkerConfig, get_loader, get_val_dataset
    from megatron.energon.task_encoder import DefaultTaskEncoder, stateless
    from megatron.energon.task_encoder.cooking import Cooker

    @stateless
    def keep(sample: Any) -> Any:
        return sample

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(keep)]
        decoder = None

    dataset = get_val_dataset(
        folder,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        task_encoder=Encoder(),
    )
    for sample in get_loader(dataset):
        yield (
            sample["__key__"],
            {suffix: describe(suffix, content) for suffix, content in sample.items() if not suffix.startswith("__")},
        )


def members_of_row(row: Mapping[str, Any]) -> Described:
    """Returns the members of a row of a table, by its column `__members__`."""
    members = {} if not row["json"] else {"json": describe("json", row["json"])}
    places: dict[str, int] = {}
    for column, suffix, *size in json.loads(row["__members__"]):
        content = row[column]
        if isinstance(content, list):  # a list of files
            content = content[places.get(column, 0)]
            places[column] = places.get(column, 0) + 1
        elif size:  # files that are joined
            start = places.get(column, 0)
            content = content[start : start + size[0]]
            places[column] = start + size[0]
        picture = None
        if isinstance(content, Mapping):
            content, picture = content["bytes"], content.get("decoded")
        members[suffix] = describe(suffix, content, picture)
    return row["__key__"], members


def read_mds(folder: Path) -> Iterator[Described]:
    """Yields the samples of shards."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    return (members_of_row(dataset[index]) for index in range(len(dataset)))


def read_litdata(folder: Path) -> Iterator[Described]:
    """Yields the samples of chunks."""
    import litdata

    return map(members_of_row, litdata.StreamingDataset(str(folder), shuffle=False))


def read_hf(folder: Path) -> Iterator[Described]:
    """Yields the rows of a dataset, with pictures as `datasets` decodes them."""
    import datasets

    dataset = datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.with_name(f"{folder.name}-cache")))
    pictures = dataset.select_columns([n for n, one in dataset.features.items() if isinstance(one, datasets.Image)])
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
        elif isinstance(inner := getattr(feature, "feature", None), datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(type(inner)(decode=False)))
    for index, row in enumerate(dataset.with_format("arrow").iter(1)):
        values = {name: plain_value(row.column(name).combine_chunks()[0]) for name in row.column_names}
        for name, picture in pictures[index].items() if pictures.column_names else ():
            if values[name] is not None:
                values[name]["decoded"] = picture
        yield members_of_row(values)


def plain_value(value: Any) -> Any:
    """Returns a value of Arrow in Python; lists of numbers are arrays."""
    import pyarrow as pa

    kind = value.type.storage_type if isinstance(value.type, pa.BaseExtensionType) else value.type
    depth = kind
    while pa.types.is_list(depth) or pa.types.is_large_list(depth) or pa.types.is_fixed_size_list(depth):
        depth = depth.value_type
    if depth is not kind and (pa.types.is_floating(depth) or pa.types.is_integer(depth)) and value.is_valid:
        return np.array(value.as_py(), depth.to_pandas_dtype())
    return value.as_py()


def rows_of(table: Any) -> Iterator[Described]:
    """Yields the members of the rows of a table."""
    for index in range(table.num_rows):
        yield members_of_row({name: plain_value(table.column(name)[index]) for name in table.column_names})


def read_parquet(folder: Path) -> Iterator[Described]:
    """Yields the rows of Parquet files."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("*.parquet")):
        yield from rows_of(pq.read_table(path))


def read_lance(folder: Path) -> Iterator[Described]:
    """Yields the rows of a version, blobs among them."""
    import lance

    dataset = lance.dataset(str(folder))
    blobs = [f.name for f in dataset.schema if (f.metadata or {}).get(b"lance-encoding:blob") == b"true"]
    table = dataset.to_table(columns=[name for name in dataset.schema.names if name not in blobs])
    for index in range(table.num_rows):
        row = {name: plain_value(table.column(name)[index]) for name in table.column_names}
        for name in blobs:
            row[name] = b"".join(
                blob.readall() for blob in dataset.take_blobs(name, indices=[index]) if blob is not None
            )
        yield members_of_row(row)


# -- episodes: samples whose arrays and cameras have an item for each frame


def arrays_of(sample: Sample) -> dict[str, np.ndarray]:
    """Returns the arrays of an episode by their names."""
    files = {suffix.removesuffix(".npy"): data for suffix, data in sample.items() if suffix.endswith(".npy")}
    return {name: np.load(io.BytesIO(data)) for name, data in files.items()}


def pictures_of(sample: Sample) -> dict[str, list[bytes]]:
    """Returns the encoded pictures of each camera, in the order of their frames."""
    cameras: dict[str, dict[int, bytes]] = {}
    for suffix, data in sample.items():
        name, _, number = suffix.rpartition(".")[0].rpartition(".")
        if suffix.rpartition(".")[2] in IMAGES and number.isdecimal():
            cameras.setdefault(name, {})[int(number)] = data
    return {name: [pictures[number] for number in sorted(pictures)] for name, pictures in cameras.items()}


def decoded_pictures(pictures: Iterable[bytes]) -> np.ndarray:
    """Returns the pixels of encoded pictures: (frames, height, width, 3)."""
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")) for picture in pictures])


def decoded_video(content: bytes) -> np.ndarray:
    """Returns the pixels of a video: (frames, height, width, 3)."""
    import av

    with av.open(io.BytesIO(content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def thumbnails(frames: np.ndarray) -> list[Any]:
    """Returns the means of square blocks of pixels of each frame; of small frames each pixel."""
    count, height, width, channels = frames.shape
    side = max(height, width) // THUMBNAIL_PIXELS
    height, width = height // side, width // side
    blocks = frames[:, : height * side, : width * side].reshape(count, height, side, width, side, channels)
    means: list[Any] = blocks.mean(axis=(2, 4)).round().astype(int).tolist()
    return means


def describe_array(array: np.ndarray) -> list[Any]:
    """Returns the digest of an array (frames, columns) in the type that LeRobot returns: float32, int64 or bool."""
    kind = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind]
    return describe("npy", array.reshape(len(array), -1).astype(kind))


def write_lerobot(samples: list[Sample], folder: Path) -> None:
    """Writes episodes frame by frame: LeRobot encodes the cameras, and sets the clock."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    episodes = []
    for sample in samples:
        arrays = {name: array for name, array in arrays_of(sample).items() if name != "timestamp"}
        images = {name: decoded_pictures(pictures) for name, pictures in pictures_of(sample).items()}
        videos = {s.removesuffix(".mp4"): decoded_video(data) for s, data in sample.items() if s.endswith(".mp4")}
        episodes.append((arrays, images, videos, json.loads(sample["json"])))
    kinds = {"image": episodes[0][1], "video": episodes[0][2]}
    features: dict[str, Any] = {
        name: {"dtype": kind, "shape": frames.shape[1:], "names": ["height", "width", "channels"]}
        for kind, cameras in kinds.items()
        for name, frames in cameras.items()
    }
    for name, array in episodes[0][0].items():
        features[name] = {"dtype": array.dtype.name, "shape": array.shape[1:] or (1,), "names": None}
    first = episodes[0][3]
    first = {**first.get("info", {}), **first}
    folder.rmdir()  # it makes the folder itself
    dataset = LeRobotDataset.create(
        "user/name", fps=int(first["fps"]), features=features, root=folder, robot_type=first["robot_type"]
    )
    for arrays, images, videos, values in episodes:
        columns = {**arrays, **images, **videos}
        for row in zip(*columns.values(), strict=True):
            frame = {name: np.atleast_1d(value) for name, value in zip(columns, row, strict=True)}
            dataset.add_frame({**frame, "task": values["task"]})
        dataset.save_episode()
    dataset.finalize()


def read_lerobot(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the episodes, and of some frames the features of the frame before, which `delta_timestamps` ask for."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("user/name", root=folder, video_backend="pyav")
    counters = ("frame_index", "episode_index", "index", "task_index")
    names = [name for name in dataset.features if name not in counters]
    deltas = {name: [-1 / dataset.fps, 0] for name in names if name != "timestamp"}  # by which it finds frames
    pairs = LeRobotDataset("user/name", root=folder, video_backend="pyav", delta_timestamps=deltas)
    bounds = zip(dataset.meta.episodes["dataset_from_index"], dataset.meta.episodes["dataset_to_index"], strict=True)
    end = 0
    for number, (start, end) in enumerate(bounds):
        items = [dataset[index] for index in range(start, end)]
        assert [int(item["frame_index"]) for item in items] == list(range(end - start))
        assert {int(item["episode_index"]) for item in items} == {number}
        before = [pairs[index] for index in range(start, end, DELTA_STEP)]
        assert [bool(item["action_is_pad"][0]) for item in before] == [True] + [False] * (len(before) - 1)
        yield {
            "task": sorted({item["task"] for item in items}),
            "frames": {name: described_feature(dataset, name, [item[name] for item in items]) for name in names},
            "before": {name: described_feature(dataset, name, [item[name][0] for item in before]) for name in deltas},
        }
    assert len(dataset) == end


def described_feature(dataset: Any, name: str, values: list[Any]) -> list[Any]:
    """Returns the digest of the values of a feature in some frames, or thumbnails of a camera."""
    array = np.stack([value.numpy() for value in values])
    if name in dataset.meta.camera_keys:
        return thumbnails((array.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8))
    return describe_array(array)


def write_hdf5(samples: list[Sample], folder: Path) -> None:
    """Writes a file for each episode: arrays, encoded pictures, and values of the JSON as attributes."""
    import h5py

    for sample in samples:
        with h5py.File(folder / f"{sample['__key__']}.hdf5", "w") as file:
            for name, value in json.loads(sample["json"]).items():
                file.attrs[name] = json.dumps(value) if isinstance(value, dict) else value
            for name, array in arrays_of(sample).items():
                file[name.replace(".", "/")] = array
            for name, pictures in pictures_of(sample).items():
                padded = np.array(pictures)  # with zeros at the end
                file[name.replace(".", "/")] = padded.view(np.uint8).reshape(len(pictures), -1)


def write_mcap(samples: list[Sample], folder: Path) -> None:
    """Writes a recording for each episode: a topic for each array and each camera, with messages in JSON."""
    from mcap.writer import Writer

    for sample in samples:
        with (folder / f"{sample['__key__']}.mcap").open("wb") as file:
            writer = Writer(file)
            writer.start()
            arrays = arrays_of(sample)
            times = [round(float(seconds) * 1e9) for seconds in arrays.pop("timestamp")]
            topics: dict[str, tuple[str, list[Any]]] = {
                name: ("Values", [{"value": row} for row in array.tolist()]) for name, array in arrays.items()
            }
            for name, pictures in pictures_of(sample).items():
                messages = [{"format": "png", "data": base64.b64encode(picture).decode()} for picture in pictures]
                topics[name] = ("foxglove.CompressedImage", messages)
            for name, (schema, messages) in topics.items():
                described = writer.register_schema(schema, encoding="jsonschema", data=b"{}")
                channel = writer.register_channel(f"/{name.replace('.', '/')}", "json", described)
                for time, message in zip(times, messages, strict=True):
                    writer.add_message(channel, log_time=time, publish_time=time, data=json.dumps(message).encode())
            writer.finish()


# -- the command


def versions(packages: Iterable[str]) -> Mapping[str, str]:
    """Returns the version of each package."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def main(command: str, *arguments: str) -> None:
    """Runs a command."""
    if command == "versions":
        json.dump(versions(arguments), sys.stdout)
        return
    function: Callable[..., Any] = globals()[f"{command}_{arguments[0]}"]
    if command == "write":
        for shard, folder in zip(arguments[1::2], arguments[2::2], strict=True):
            Path(folder).mkdir(parents=True)
            function(list(samples_of(Path(shard))), Path(folder))
        return
    results = {folder: list(function(Path(folder))) for folder in arguments[1:]}
    sys.stdout.write(f"\n{json.dumps(results)}\n")  # libraries print, too


if __name__ == "__main__":
    main(*sys.argv[1:])
