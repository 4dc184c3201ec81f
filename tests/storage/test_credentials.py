"""An S3 store without credentials, or with some that it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import CredentialsError, SourceError
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardKind, describe_file, expand_shards
from mm_assets.storage.store import Store
from mm_assets.storage.urls import filesystem, reason, storage_fault

from ..http_server import Reply, answer


def test_missing_credentials_say_where_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variables and the settings, without a request to any server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/no/such/file")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = Store("s3://some-bucket/root", {"skip_instance_cache": True})
    with pytest.raises(SourceError, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID.*`storage_options`.*`root_options`"):
        store.sizes("")


def test_rotated_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of credentials that was written again, or other variables, are those of the next use of a file system."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(key: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        draft.replace(tmp_path / "credentials")

    def used() -> tuple[object, str]:
        """The client of the one file system of the URL, and the key that it signs with."""
        fs, _ = filesystem("s3://some-bucket/root", {"client_kwargs": {"region_name": "eu-west-1"}})
        return fs.s3, fs.s3._request_signer._credentials.access_key

    write("FIRST")
    client, key = used()
    assert key == "FIRST"
    assert used() == (client, "FIRST"), "nothing has changed"
    write("OTHER")
    assert used()[1] == "OTHER"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "THIRD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert used()[1] == "THIRD"


@pytest.mark.parametrize("said", ["Forbidden", "Access Denied"])
def test_a_refusal_says_which_permissions_it_takes(said: str) -> None:
    """S3 gives no reason with these; the system's own refusal of a local file is not about S3."""
    assert "s3:GetObject" in reason(PermissionError(said))
    assert reason(PermissionError(13, "Permission denied")) == "Permission denied"


@pytest.mark.parametrize("response", [{}, {"Error": {}}, None])
def test_a_refusal_without_a_reply_is_about_credentials_too(response: object) -> None:
    """The kind of error is enough, whatever the client gives of the storage's reply."""
    error = type("TokenRetrievalError", (Exception,), {"response": response})()
    assert reason(error).startswith("the credentials have expired (TokenRetrievalError): ")


USES: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "describe": describe_file,
    "list a file": lambda url, options: expand_shards(url, options, kinds=[ShardKind("tar", (".tar",))]),
    "list a folder": lambda url, options: expand_shards(
        url.removesuffix("x.tar"), options, kinds=[ShardKind("tar", (".tar",))]
    ),
    "open": SourceFile,
    "size": lambda url, options: Store("s3://bucket/data", options).size("x.tar"),
    "read": lambda url, options: Store("s3://bucket/data", options).read_bytes("x.tar"),
    "write": lambda url, options: Store("s3://bucket/data", options).write_bytes("x.tar", b"content"),
}


def refusing(code: str, status: int) -> Callable[[str, str], Reply]:
    """A store that refuses every request with a code of S3, which replies to HEAD do not have."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return lambda method, _: (status, {"Content-Type": "application/xml"}, b"" if method == "HEAD" else body)


def options_for(url: str) -> dict[str, Any]:
    return {"key": "k", "secret": "s", "token": "t", "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}}


@pytest.mark.parametrize(
    ("use", "code", "status", "message"),
    [
        *(
            (use, "ExpiredToken", 400, r"the credentials have expired \(ExpiredToken: no\).*AWS_SESSION_TOKEN")
            for use in USES
        ),
        ("describe", "ExpiredToken", 403, r"the credentials have expired"),
        ("describe", "InvalidToken", 400, r"does not accept the credentials \(InvalidToken: no\).*AWS_PROFILE"),
        ("describe", "InvalidAccessKeyId", 403, r"does not accept the credentials \(InvalidAccessKeyId: no\)"),
        ("describe", "SignatureDoesNotMatch", 403, r"does not accept the credentials"),
        ("describe", "RequestTimeTooSkewed", 403, r"the clock of this machine"),
    ],
)
def test_refused_credentials_are_named(use: str, code: str, status: int, message: str) -> None:
    """The error says what is wrong with the credentials, whatever was asked for: also HEAD, whose reply has no body."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    with (
        answer(refusing(code, status)) as (url, _),
        pytest.raises(CredentialsError, match=message) as raised,
    ):
        USES[use]("s3://bucket/data/x.tar", options_for(url))
    assert storage_fault(raised.value) == "credentials"


@pytest.mark.parametrize("use", USES)
def test_a_denied_request_is_about_permissions(use: str) -> None:
    """Valid credentials without a permission are not refused: another file may be readable."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    with (
        answer(refusing("AccessDenied", 403)) as (url, _),
        pytest.raises(SourceError, match=r"s3:GetObject") as raised,
    ):
        USES[use]("s3://bucket/data/x.tar", options_for(url))
    assert not isinstance(raised.value, CredentialsError)
    assert storage_fault(raised.value) is None


def test_a_signed_url_that_ended_is_not_a_missing_file() -> None:
    """A server that refuses a URL over HTTP has the file perhaps; the message says what may have ended."""
    with (
        answer(lambda *_: (403, {}, b"Request has expired")) as (url, _),
        pytest.raises(SourceError, match=r"403.*if the URL is presigned, it may have expired") as raised,
    ):
        describe_file(f"{url}/x.tar?X-Amz-Signature=1")
    assert "not found" not in str(raised.value)


def test_options_of_another_kind_of_url_are_named() -> None:
    """A key of S3 with an HTTP URL does not make the file missing: the error names the setting and the argument."""
    with pytest.raises(SourceError, match=r"`storage_options` have an argument .*'key'\)$") as caught:
        expand_shards("http://127.0.0.1:9/a.tar", {"key": "SECRET"}, kinds=[ShardKind("tar", (".tar",))])
    assert "SECRET" not in str(caught.value)
