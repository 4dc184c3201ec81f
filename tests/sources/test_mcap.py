"""Tests of MCAP recordings as containers: topics on one clock, images of messages, hostile files, packed files."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import lz4.frame
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.writer import CompressionType, IndexType, Writer

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.sources import mcap as mcap_source
from mm_assets.sources.mcap import McapSource
from mm_assets.sources.member import ShardDamage
from mm_assets.storage.files import SourceFile

from ..pipeline.shards import make_shard
from . import members
from .members import array, pack, payloads_of, pixels
from .robots import real_episodes

MAX_BYTES = 1 << 20
START = 1_700_000_000_000_000_000  # nanoseconds
Message = tuple[str, str, str, float, bytes]  # topic, encoding, schema, seconds, content


def write(
    path: Path, messages: Sequence[Message], *, attachments: dict[str, bytes] | None = None, **options: Any
) -> Path:
    """A recording, written by the library of the format."""
    with path.open("wb") as target:
        writer = Writer(target, **options)
        writer.start(profile="test", library="tests")
        channels: dict[tuple[str, ...], int] = {}
        for topic, encoding, schema, seconds, content in messages:
            if (topic, schema) not in channels:
                described = 0
                if schema:
                    described = writer.register_schema(schema, encoding=f"{encoding}schema", data=b"definition")
                channels[topic, schema] = writer.register_channel(topic, encoding, described)
            time = START + round(seconds * 1e9)
            writer.add_message(channels[topic, schema], log_time=time, publish_time=time, data=content)
        for name, content in (attachments or {}).items():
            writer.add_attachment(START, START, name, "application/x", content)
        writer.add_metadata("rig", {"robot": "arm"})
        writer.finish()
    return path


def source_of(path: Path | str) -> McapSource:
    return McapSource(SourceFile(str(path)))


def contents(path: Path | str, **options: Any) -> dict[str, bytes]:
    return members.contents(source_of(path), **options)


def skipped(path: Path) -> dict[str, str]:
    return members.skip_reasons(source_of(path))


def jpeg(level: int) -> bytes:
    return members.image(level, "JPEG")


def joints(seconds: float, first: float, **content: Any) -> Message:
    """A message of numbers in JSON."""
    values = {"name": "arm", "position": [first, 1], "moving": True, **content}
    return "/arm/joint_states", "json", "JointState", seconds, json.dumps(values).encode()


def ros1(*parts: int | str | bytes, header: bool = True) -> bytes:
    """A message of ROS 1: numbers of 32 bits, texts and bytes after their length."""
    head = struct.pack("<IIII", 1, 2, 3, 1) + b"f" if header else b""
    return head + b"".join(
        struct.pack("<I", part) if isinstance(part, int) else struct.pack("<I", len(part)) + _bytes(part)
        for part in parts
    )


def cdr(*parts: int | str | bytes, order: str = "<") -> bytes:
    """A message of ROS 2, whose numbers are aligned."""
    body = bytearray()
    for part in (2, 3, "frame", *parts):
        body += bytes(-len(body) % 4)
        text = part.encode() + b"\0" if isinstance(part, str) else part
        body += struct.pack(f"{order}I", text if isinstance(text, int) else len(text))
        body += b"" if isinstance(text, int) else text
    return bytes([0, order == "<", 0, 0]) + bytes(body)


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part


def protobuf(**fields: bytes | int) -> bytes:
    """A message of protobuf: bytes, and integers of 32 bits, by numbers of fields after ``f``."""
    target = b""
    for name, value in fields.items():
        number = int(name[1:])
        if isinstance(value, int):
            target += bytes([number << 3 | 5]) + struct.pack("<I", value)
        else:
            size = len(value)
            target += bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + value
    return target


def big(data: bytes) -> str:
    return base64.b64encode(data).decode()


class TestMembers:
    @pytest.mark.parametrize(
        "options", [{}, {"chunk_size": 200}, {"use_chunking": False}, {"index_types": IndexType.NONE}]
    )
    @pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.LZ4, CompressionType.ZSTD])
    def test_topics_are_streams_on_one_clock(self, tmp_path: Path, options: dict[str, Any], compression: Any) -> None:
        """Numbers, images and other messages have their times from the first message on, whatever the file's layout."""
        messages = [joints(0.5 + n / 10, n) for n in (0, 2, 1)]
        images = [jpeg(60 * n) for n in range(3)]
        messages += [
            ("/cam", "cdr", "sensor_msgs/msg/CompressedImage", n / 4, cdr("jpeg", images[n])) for n in range(3)
        ]
        messages += [
            ("/log", "json", "Log", n / 2, json.dumps({"text": f"line\n{n}"}, indent=1).encode()) for n in range(2)
        ]
        messages += [("/raw", "cdr", "Imu", n + 0.25, bytes([n] * (n + 1))) for n in range(3)]
        found = contents(write(tmp_path / "a.b.mcap", messages, compression=compression, **options))
        np.testing.assert_array_equal(array(found["a%2Eb.arm.joint_states.npy"]), [[0, 1, 1], [1, 1, 1], [2, 1, 1]])
        times = {"arm.joint_states": [0.5, 0.6, 0.7], "cam": [0, 0.25, 0.5], "log": [0, 0.5], "raw": [0.25, 1.25, 2.25]}
        for topic, expected in times.items():
            np.testing.assert_allclose(array(found[f"a%2Eb.{topic}.timestamp.npy"]), expected, atol=1e-9)
        assert [found[f"a%2Eb.cam.{n}.jpg"] for n in range(3)] == images
        assert [json.loads(line) for line in found["a%2Eb.log.jsonl"].splitlines()] == [
            {"text": "line\n0"},
            {"text": "line\n1"},
        ]
        assert (found["a%2Eb.raw.bin"], array(found["a%2Eb.raw.offset.npy"]).tolist()) == (b"\0\1\1\2\2\2", [0, 1, 3])
        values = json.loads(found["a%2Eb.json"])
        assert (values["profile"], values["start_time_ns"], values["duration_seconds"]) == ("test", START, 2.25)
        assert values["metadata"] == [{"name": "rig", "robot": "arm"}]
        assert values["topics"]["arm.joint_states"] == {
            "topic": "/arm/joint_states",
            "encoding": "json",
            "schema": "JointState",
            "messages": 3,
            "columns": ["position.0", "position.1", "moving"],
            "constants": {"name": "arm"},
        }
        assert values["topics"]["raw"]["schema_data"] == "definition"

    @pytest.mark.parametrize(
        "change",
        [{"position": [1]}, {"name": "leg"}, {"moving": None}, {"extra": 1}, {"moving": 1 << 60}, {"moving": "x"}],
    )
    def test_messages_that_differ_are_lines(self, tmp_path: Path, change: dict[str, Any]) -> None:
        """JSON whose messages do not all have the same numbers and texts loses nothing: it stays JSON."""
        messages = [joints(0, 1), joints(1, 2, **change)]
        found = contents(write(tmp_path / "a.mcap", messages))
        assert "a.arm.joint_states.npy" not in found
        lines = found["a.arm.joint_states.jsonl"].splitlines()
        assert [json.loads(line) for line in lines] == [json.loads(message[-1]) for message in messages]

    @pytest.mark.parametrize(
        ("encoding", "schema", "content"),
        [
            ("ros1", "sensor_msgs/CompressedImage", ros1("rgb8; jpeg compressed bgr8", jpeg(9))),
            ("cdr", "sensor_msgs/msg/CompressedImage", cdr("jpeg", jpeg(9))),
            ("cdr", "sensor_msgs/msg/CompressedImage", cdr("jpeg", jpeg(9), order=">")),
            ("json", "foxglove.CompressedImage", json.dumps({"data": big(jpeg(9)), "format": "jpeg"}).encode()),
            ("protobuf", "foxglove.CompressedImage", protobuf(f4=b"x", f2=jpeg(9), f3=b"jpeg")),
        ],
    )
    def test_encoded_images_are_read_where_they_are(
        self, tmp_path: Path, encoding: str, schema: str, content: bytes
    ) -> None:
        """An encoded image of each format is a member with its bytes, by its place in the file if nothing packs it."""
        for compression in (CompressionType.NONE, CompressionType.ZSTD):
            path = write(tmp_path / "a.mcap", [("/c", encoding, schema, 0, content)], compression=compression)
            assert contents(path)["a.c.0.jpg"] == jpeg(9)
            (member,) = (member for member in source_of(path).members() if member.extension == "jpg")
            assert (member.byte_offset is not None) == (compression is CompressionType.NONE and encoding != "json")

    @pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "rgba8", "bgra8", "mono8", "16UC1"])
    @pytest.mark.parametrize("kind", ["ros1", "cdr", "json", "protobuf"])
    def test_raw_images_are_png(self, tmp_path: Path, encoding: str, kind: str) -> None:
        """Pixels of each format and order, with bytes between the rows, are PNG with the same pixels."""
        channels = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4}.get(encoding, 1)
        dtype = np.dtype("<u2" if encoding == "16UC1" else "u1")
        expected = np.random.default_rng(0).integers(0, 250, (4, 5, channels)).astype(dtype)
        stored = expected[..., [2, 1, 0, 3][:channels]] if encoding.startswith("bgr") else expected
        step = 5 * channels * dtype.itemsize + 3
        data = b"".join(row.tobytes() + b"pad" for row in stored)
        content, schema = {
            "ros1": (
                ros1(4, 5, encoding) + struct.pack("<BI", 0, step) + ros1(data, header=False),
                "sensor_msgs/Image",
            ),
            "cdr": (cdr_image(4, 5, encoding, step, data), "sensor_msgs/msg/Image"),
            "json": (
                json.dumps({"height": 4, "width": 5, "step": step, "encoding": encoding, "data": big(data)}).encode(),
                "foxglove.RawImage",
            ),
            "protobuf": (protobuf(f2=5, f3=4, f4=encoding.encode(), f5=step, f6=data), "foxglove.RawImage"),
        }[kind]
        found = contents(write(tmp_path / "a.mcap", [("/c", kind, schema, 0, content)]))
        np.testing.assert_array_equal(pixels(found["a.c.0.png"]), expected[..., 0] if channels == 1 else expected)

    @pytest.mark.parametrize("encoding", ["json", "protobuf"])
    def test_frames_of_video_are_one_stream(self, tmp_path: Path, encoding: str) -> None:
        """Frames of Foxglove's video are joined in the order of their times, with their places."""
        frames = {1.0: b"second", 0.5: b"1st"}
        messages: list[Message] = []
        for seconds, frame in frames.items():
            content = protobuf(f2=b"id", f3=frame, f4=b"h264")
            if encoding == "json":
                content = json.dumps({"data": big(frame), "format": "h264"}).encode()
            messages.append(("/v", encoding, "foxglove.CompressedVideo", seconds, content))
        found = contents(write(tmp_path / "a.mcap", messages))
        assert (found["a.v.h264"], array(found["a.v.offset.npy"]).tolist()) == (b"1stsecond", [0, 3])

    def test_attachments_are_members(self, tmp_path: Path) -> None:
        """Attachments are read by their places, and never by their names."""
        attached = {"calib.v2.yaml": b"a: 1", "../../etc/passwd": b"x", "": b""}
        found = contents(write(tmp_path / "a.mcap", [joints(0, 1)], attachments=attached))
        assert found["a.attachments.calib%2Ev2.yaml"] == b"a: 1"
        assert sorted(name for name in found if "attachments" in name) == [
            "a.attachments.%",
            "a.attachments.%2E%2E.%2E.etc.passwd",
            "a.attachments.calib%2Ev2.yaml",
        ]

    def test_topics_with_one_name_are_different_members(self, tmp_path: Path) -> None:
        """Channels of one topic, and topics that would give a name twice, have their number in it."""
        topics = [("/a", "X"), ("/a", "Y"), ("a", "X"), ("/a/timestamp", "X"), ("/a.b", "X"), ("/a/b", "X"), ("", "X")]
        messages = [(topic, "json", schema, 0.0, b'{"x": 1}') for topic, schema in topics]
        members = [member.member for member in source_of(write(tmp_path / "f.mcap", messages)).members()]
        assert len(set(members)) == len(members) == 15
        assert {"f.a.npy", "f.a%23%23.npy", "f.a%2Eb.npy", "f.a.b.npy", "f.%.npy"} - set(members) == {"f.a%23%23.npy"}

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_numbers_come_back_in_the_order_of_their_times(self, tmp_path: Path, data: st.DataObject) -> None:
        """Rows of any number of topics, logged in any order, are sorted by time, equal times as they were written."""
        logged = data.draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.floats(-9, 9)), min_size=1))
        messages = [(topic, "json", "", seconds, json.dumps({"x": x}).encode()) for topic, seconds, x in logged]
        sizes = st.sampled_from([{}, {"chunk_size": 100}, {"use_chunking": False}])
        found = contents(write(tmp_path / "f.mcap", messages, **data.draw(sizes)))
        first = min(seconds for _, seconds, _ in logged)
        for topic in {topic for topic, _, _ in logged}:
            rows = sorted((pair for pair in logged if pair[0] == topic), key=lambda pair: pair[1])
            assert array(found[f"f.{topic}.npy"])[:, 0].tolist() == [x for _, _, x in rows]
            assert array(found[f"f.{topic}.timestamp.npy"]).tolist() == [seconds - first for _, seconds, _ in rows]

    def test_arrays_beyond_the_budget_take_several_passes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What does not fit in memory together is read one after the other, with the same result."""
        messages = [(f"/t{n % 3}", "json", "", n, json.dumps({"x": n}).encode()) for n in range(30)]
        path = write(tmp_path / "a.mcap", messages, chunk_size=100)
        expected = contents(path)
        monkeypatch.setattr(mcap_source, "PASS_BYTES", 1)
        assert contents(path) == expected

    def test_a_remote_file_gives_the_same_members(self, tmp_path: Path) -> None:
        """A file in an object store is read by ranges, with the same members and bytes."""
        path = write(tmp_path / "a.mcap", [joints(n, n) for n in range(9)], attachments={"x.txt": b"x"})
        memory = fsspec.filesystem("memory")
        memory.pipe("/robots/a.mcap", path.read_bytes())
        try:
            assert contents("memory://robots/a.mcap") == contents(path)
        finally:
            memory.rm("/robots", recursive=True)

    def test_it_is_detected(self, tmp_path: Path) -> None:
        """MCAP is known by its first bytes, and a folder is searched for its names."""
        path = write(tmp_path / "renamed.bin", [joints(0, 0)])
        assert isinstance(row_sources([SourceFile(str(path))])[0].sources[0], McapSource)
        assert any(".mcap" in kind.suffixes for kind in shard_kinds(None, where="test"))


def cdr_image(height: int, width: int, encoding: str, step: int, data: bytes) -> bytes:
    """An image of ROS 2, which has a number of 8 bits among those of 32."""
    head = cdr(height, width, encoding)
    head += b"\0"
    head += bytes(-(len(head) - 4) % 4)
    return head + struct.pack("<II", step, len(data)) + data


class TestFaults:
    def test_an_image_that_is_none_is_rejected(self, tmp_path: Path) -> None:
        """Messages whose image is not one are entries with the reason, and the others are images."""
        good, schema = cdr("jpeg", jpeg(1)), "sensor_msgs/msg/CompressedImage"
        wrong = [cdr("jpeg", b"text"), good[:40], b"", b"\0\7\0\0" + good[4:]]
        messages = [("/c", "cdr", schema, n, content) for n, content in enumerate([good, *wrong, good])]
        path = write(tmp_path / "a.mcap", messages)
        assert [name for name in contents(path) if name.endswith("jpg")] == ["a.c.0.jpg", "a.c.5.jpg"]
        assert set(skipped(path)) == {f"a.c.{n}" for n in range(1, 5)}
        assert "not an image" in skipped(path)["a.c.1"]

    @pytest.mark.parametrize(
        "image", [(1 << 31, 1 << 31, "rgb8", 12), (4, 4, "rgb8", 1), (4, 4, "bayer", 12), (0, 4, "mono8", 4)]
    )
    def test_a_topic_that_does_not_decode_keeps_its_bytes(self, tmp_path: Path, image: Any) -> None:
        """Raw images of unknown or impossible layout stay messages, and the JSON says why."""
        height, width, encoding, step = image
        content = cdr_image(height, width, encoding, step, bytes(48))
        found = contents(write(tmp_path / "a.mcap", [("/c", "cdr", "sensor_msgs/msg/Image", 0, content)]))
        assert found["a.c.bin"] == content
        assert json.loads(found["a.json"])["topics"]["c"]["not_decoded"]

    @pytest.mark.parametrize("compression", ["zstd", "lz4"])
    def test_a_bomb_is_refused(self, tmp_path: Path, compression: str) -> None:
        """A chunk that unpacks to more than it states, or states more than allowed, is damage and is not unpacked."""
        import zstandard

        zeros = bytes(50 << 20)
        packed = zstandard.compress(zeros) if compression == "zstd" else lz4.frame.compress(zeros)
        for stated, detail in ((1000, "unpacks to 1,001 bytes or more"), (1 << 40, "at most")):
            name = compression.encode()
            chunk = struct.pack("<QQQII", 0, 0, stated, 0, len(name)) + name + struct.pack("<Q", len(packed)) + packed
            path = tmp_path / "a.mcap"
            path.write_bytes(mcap_source.MAGIC + struct.pack("<BQ", 6, len(chunk)) + chunk)
            with pytest.raises(ShardError, match=detail) as caught:
                contents(path)
            assert caught.value.byte_offset == 8

    def test_a_large_member_is_an_error_of_its_own(self, tmp_path: Path) -> None:
        """A member above the limit raises with its name, or goes to `on_error`, and the others are yielded."""
        path = write(tmp_path / "a.mcap", [("/r", "cdr", "", 0, bytes(5000)), joints(0, 0)])
        errors: list[str] = []
        source = source_of(path)
        found = source.payloads(wanted=lambda _: True, max_bytes=4000, on_error=lambda m, _: errors.append(m.member))
        assert "a.r.bin" not in {member.member for member, _ in found}
        assert errors == ["a.r.bin"]
        with pytest.raises(SourceError, match="holds 5000 bytes, allowed are 4000"):
            list(source.payloads(wanted=lambda _: True, max_bytes=4000))

    def test_a_recording_that_was_not_finished_is_read(self, tmp_path: Path) -> None:
        """A file without a footer is read to its end, and `missing_end` says so; a half record is damage."""
        path = write(tmp_path / "a.mcap", [joints(n, n) for n in range(20)], chunk_size=300)
        whole = path.read_bytes()
        source = source_of(path)
        assert (len(list(source.members())), source.missing_end) == (3, None)
        end = whole.index(b"\x0f" + struct.pack("<Q", 4))  # the record that ends the data
        path.write_bytes(whole[:end])
        source = source_of(path)
        assert len(list(source.members())) == 3
        assert source.missing_end is not None
        path.write_bytes(whole[: end - 5])
        with pytest.raises(ShardError, match="truncated"):
            list(source_of(path).members())
        damage: list[ShardDamage] = []
        members = list(source_of(path).members(on_damaged_shard="salvage", damage=damage))
        assert [member.member for member in members][:3] == [
            *("a.json", "a.arm.joint_states.npy", "a.arm.joint_states.timestamp.npy")
        ]
        assert (len(damage), members[-1].byte_size) == (1, damage[0].byte_size)

    def test_messages_of_an_unknown_channel_are_counted(self, tmp_path: Path) -> None:
        """Messages whose channel the file does not describe are an entry with their number."""
        message = struct.pack("<HIQQ", 7, 0, 0, 0) + b"data"
        path = tmp_path / "a.mcap"
        path.write_bytes(mcap_source.MAGIC + 2 * (struct.pack("<BQ", 5, len(message)) + message))
        assert skipped(path) == {"a.channel 7": "2 messages of a channel that the file does not describe"}

    @pytest.mark.parametrize("content", [b"", b"\x89MCAP", b"PK\x03\x04", b"text\n"])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes) -> None:
        """An empty, truncated or other file is a `ShardError` at byte 0."""
        (tmp_path / "a.mcap").write_bytes(content)
        with pytest.raises(ShardError) as caught:
            contents(tmp_path / "a.mcap")
        assert caught.value.byte_offset == 0

    @pytest.mark.parametrize(
        "options", [{"compression": CompressionType.NONE}, {"chunk_size": 300}, {"use_chunking": False}]
    )
    def test_damage_is_an_error_or_an_entry(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """Damaged files give members, or `ShardError` with the byte; salvaging ends, and names what is lost."""
        messages = [joints(n, n) for n in range(6)]
        messages += [("/c", "cdr", "sensor_msgs/msg/CompressedImage", n, cdr("jpeg", jpeg(n))) for n in range(3)]
        path = write(tmp_path / "a.mcap", messages, attachments={"a.txt": b"text"}, **options)
        whole, noise = path.read_bytes(), random.Random(3)
        for number in range(60):
            at = noise.randrange(len(whole))
            flipped = whole[:at] + bytes([whole[at] ^ noise.randrange(1, 256)]) + whole[at + 1 :]
            path.write_bytes(whole[:at] if number % 3 == 0 else flipped)
            damage: list[ShardDamage] = []
            source = source_of(path)
            try:
                members = list(source.members(on_damaged_shard="salvage", damage=damage))
            except ShardError:
                assert at < len(mcap_source.MAGIC)
                continue
            assert [member.ordinal for member in members] == list(range(len(members)))
            assert len(damage) == sum((member.skip_reason or "").startswith("damaged") for member in members)
            if damage:
                with pytest.raises(ShardError):
                    list(source.members())
            found = source.payloads(
                wanted=lambda m: m.skip_reason is None, max_bytes=MAX_BYTES, on_damaged_shard="salvage"
            )
            assert all(len(content) == member.byte_size for member, content in found)


class TestPipeline:
    def test_a_real_episode_comes_back(self, tmp_path: Path, shared_data: Path) -> None:
        """The states of a real episode as messages of JSON are the rows that they were, at their times."""
        episode = real_episodes(shared_data)[0]
        states, seconds = episode.arrays["observation.state"], episode.arrays["timestamp"]
        messages = [
            ("/state", "json", "State", time, json.dumps({"q": row}).encode())
            for time, row in zip(seconds, states.astype(float).tolist(), strict=True)
        ]
        found = contents(write(tmp_path / "real.mcap", messages))
        np.testing.assert_array_equal(array(found["real.state.npy"]), states)
        np.testing.assert_allclose(array(found["real.state.timestamp.npy"]), seconds - seconds[0], atol=2e-9)

    def test_recordings_are_packed_as_their_tar(self, tmp_path: Path) -> None:
        """A recording is packed to the payloads of a tar of its members; each topic is a series on its own times."""
        (tmp_path / "mcap").mkdir()
        messages = [joints(n / 10, n) for n in range(20)]
        messages += [("/cam", "cdr", "sensor_msgs/msg/CompressedImage", n / 3, cdr("", jpeg(9 * n))) for n in range(4)]
        messages += [("/gripper", "json", "", n / 5, json.dumps({"width": n}).encode()) for n in range(7)]
        make_shard(tmp_path / "tar/a.tar", contents(write(tmp_path / "mcap/run.mcap", messages)))
        packed = {kind: pack(tmp_path / f"out-{kind}", tmp_path / kind) for kind in ("mcap", "tar")}
        assert packed["mcap"].fields == packed["tar"].fields
        names = ["arm.joint_states", "gripper", "cam", "cam.timestamp", "metadata"]
        assert set(names) <= set(packed["mcap"].fields)
        assert payloads_of(packed["mcap"], names) == payloads_of(packed["tar"], names)
        sample = packed["mcap"][0]
        np.testing.assert_allclose(sample["gripper"].timestamps, np.arange(7) / 5, atol=1e-9)
        assert (sample["arm.joint_states"].values.shape, len(sample["cam"])) == ((20, 3), 4)
