"""Blobs as objects of an S3 bucket. Needs the extra `hub-s3`.

A key appears only by a request that S3 carries out as a whole: a PUT, or a copy of a finished upload. A large upload
goes to a key of its own first, because its SHA-256 is known at its end only.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import logging
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from ...errors import UsageError
from ..model.refusal import Reason, Refusal
from .blobs import HASH, PIECE, UNFINISHED_S, Bucket, check_content, missing_blob

PART_BYTES = 8 << 20
"""Bytes of the first parts of an upload. S3 takes at least 5 MiB."""
PARTS_OF_A_SIZE = 250
"""Parts after which the next ones are 8 MiB larger, so that 10,000 of them, the most of S3, hold more than 1 TiB."""
COPIED_AT_ONCE = 5 << 30
"""Bytes that S3 copies by one request.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
"""
URL_S = 900
ATTEMPTS = 3
"""Attempts of a request. Clients of the hub retry too, and should hear soon that S3 is away."""
CONNECT_S = 5
READ_S = 30

_log = logging.getLogger(__name__)
_MISSING = frozenset({"404", "NoSuchKey"})
_BEHIND_THE_END = "InvalidRange"


class S3Blobs:
    """Blobs in a bucket, each an object named by its SHA-256. The bucket may hold other things beside its prefix.

    Args:
        bucket: The bucket, and how to reach it.

    Raises:
        UsageError: The service refuses the bucket or the credentials. A service that is away is no error: the hub
            starts, and refuses artifacts until it is back.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket.name
        self.prefix = f"{bucket.prefix.strip('/')}/" if bucket.prefix.strip("/") else ""
        self.client: Any = _client(bucket)
        self._check()

    def writer(self) -> S3BlobWriter:
        return S3BlobWriter(self)

    def open(self, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        if end is not None and start >= end:
            if not self.exists(sha256):
                raise missing_blob(sha256)
            return iter(())
        part = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        try:
            with refused_when_away():
                answer = self.client.get_object(Bucket=self.bucket, Key=self.key(sha256), **part)
        except ClientError as error:
            if _code(error) == _BEHIND_THE_END:
                return iter(())
            raise missing_blob(sha256) from None
        return _pieces(answer["Body"])

    def exists(self, sha256: str) -> bool:
        return self.size(self.key(sha256)) is not None

    def delete(self, sha256: str) -> None:
        with refused_when_away():
            self.client.delete_object(Bucket=self.bucket, Key=self.key(sha256))

    def presigned(self, sha256: str) -> str | None:
        # A browser that opens the URL stores them instead of showing them.
        shown = {"ResponseContentDisposition": "attachment", "ResponseContentType": "application/octet-stream"}
        wanted = {"Bucket": self.bucket, "Key": self.key(sha256), **shown}
        with refused_when_away():
            url: str = self.client.generate_presigned_url("get_object", Params=wanted, ExpiresIn=URL_S)
        return url

    def clean_up(self) -> None:
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=UNFINISHED_S)
        place = {"Bucket": self.bucket, "Prefix": f"{self.prefix}unfinished/"}
        with refused_when_away():
            for page in self.client.get_paginator("list_multipart_uploads").paginate(**place):
                for upload in page.get("Uploads", []):
                    if upload["Initiated"] < before:
                        self.client.abort_multipart_upload(
                            Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
            for page in self.client.get_paginator("list_objects_v2").paginate(**place):
                for item in page.get("Contents", []):
                    if item["LastModified"] < before:
                        self.client.delete_object(Bucket=self.bucket, Key=item["Key"])

    def key(self, sha256: str) -> str:
        """Return the key of a blob. Only a hash ever becomes one."""
        if not HASH.fullmatch(sha256):
            raise missing_blob(sha256)
        return self.prefix + sha256

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, None where it is missing."""
        try:
            with refused_when_away():
                return int(self.client.head_object(Bucket=self.bucket, Key=key)["ContentLength"])
        except ClientError:
            return None

    def _check(self) -> None:
        try:
            self.client.head_bucket(Bucket=self.bucket)
        except (ClientError, BotoCoreError) as error:
            if _is_passing(error):
                _log.warning("S3 cannot be used; artifacts are refused until it can: %s", error)
                return
            raise UsageError(
                f"storage.bucket={self.bucket!r}: S3 refuses it: {error}; check the bucket, its region and the keys"
            ) from None


class S3BlobWriter:
    """An upload on its way in. Up to one part stays in memory; more becomes a multipart upload."""

    def __init__(self, blobs: S3Blobs) -> None:
        self._blobs = blobs
        self._place = {"Bucket": blobs.bucket, "Key": f"{blobs.prefix}unfinished/{uuid.uuid4().hex}"}
        self._hash = hashlib.sha256()
        self._size = 0
        self._buffer = bytearray()
        self._upload: str | None = None
        self._parts: list[dict[str, object]] = []
        self._is_complete = False

    def write(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._size += len(piece)
        self._buffer += piece
        if len(self._buffer) >= PART_BYTES * (1 + len(self._parts) // PARTS_OF_A_SIZE):
            with refused_when_away():
                self._send_part()

    def finish(self, sha256: str | None = None, size: int | None = None) -> tuple[str, int]:
        found = self._hash.hexdigest(), self._size
        key = self._blobs.key(found[0])
        try:
            check_content(found, sha256, size)
            if self._blobs.size(key) == self._size:
                return found
            with refused_when_away():
                self._keep(key)
            if self._blobs.size(key) != self._size:
                raise _away("it kept another number of bytes")
        finally:
            self.abort()
        return found

    def abort(self) -> None:
        client, upload = self._blobs.client, self._upload
        self._buffer.clear()
        self._upload = None
        if upload is None:
            return
        try:
            if self._is_complete:
                client.delete_object(**self._place)
            else:
                client.abort_multipart_upload(**self._place, UploadId=upload)
        except (ClientError, BotoCoreError) as error:
            _log.warning("The upload %s stays in the bucket for a day: %s", self._place["Key"], error)

    def _keep(self, key: str) -> None:
        client = self._blobs.client
        if self._upload is None:
            body = bytes(self._buffer)
            client.put_object(Bucket=self._blobs.bucket, Key=key, Body=body, ContentMD5=_md5(body))
            return
        if self._buffer:
            self._send_part()
        parts = {"Parts": self._parts}
        client.complete_multipart_upload(**self._place, UploadId=self._upload, MultipartUpload=parts)
        self._is_complete = True
        # One after the other: threads of boto3's own would outlive the call.
        config = TransferConfig(multipart_threshold=COPIED_AT_ONCE, multipart_chunksize=1 << 30, use_threads=False)
        client.copy(self._place, self._blobs.bucket, key, Config=config)

    def _send_part(self) -> None:
        client = self._blobs.client
        if self._upload is None:
            self._upload = client.create_multipart_upload(**self._place)["UploadId"]
        body = bytes(self._buffer)
        number = len(self._parts) + 1
        answer = client.upload_part(
            **self._place, UploadId=self._upload, PartNumber=number, Body=body, ContentMD5=_md5(body)
        )
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._buffer.clear()


@contextmanager
def refused_when_away() -> Iterator[None]:
    """Translate errors of S3 to a refusal that clients retry.

    A wrong key or a bucket that is gone counts as away too: the hub's admin mends it, and clients must keep the bytes
    until then.

    Raises:
        ClientError: An object is missing, or shorter than the wanted part.
    """
    try:
        yield
    except ClientError as error:
        if _code(error) in _MISSING or _code(error) == _BEHIND_THE_END:
            raise
        _log.warning("S3 refused a request: %s", error)
        raise _away(f"it refuses the hub with {_code(error)}") from error
    except BotoCoreError as error:
        _log.warning("S3 does not answer: %s", error)
        raise _away("it does not answer") from error


def _client(bucket: Bucket) -> Any:
    config = Config(
        retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        max_pool_connections=32,
        signature_version="s3v4",
        s3={"addressing_style": "path" if bucket.endpoint else "auto"},
        # Not every service knows the newer checksums. Content-MD5, which all know, guards the way there.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="skyward",
    )
    try:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=bucket.endpoint or None,
            region_name=bucket.region or None,
            aws_access_key_id=bucket.access_key or None,
            aws_secret_access_key=bucket.secret_key or None,
            config=config,
        )
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"storage.endpoint={bucket.endpoint!r}: {error}; write it as https://HOST") from None


def _pieces(body: Any) -> Generator[bytes, None, None]:
    """Yield a body's pieces. botocore raises where fewer bytes come than were announced."""
    try:
        with refused_when_away():
            yield from body.iter_chunks(PIECE)
    finally:
        body.close()


def _is_passing(error: ClientError | BotoCoreError) -> bool:
    """Report whether a fault may pass by itself."""
    if isinstance(error, ClientError):
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) >= 500
    return not isinstance(error, NoCredentialsError | PartialCredentialsError)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _away(why: str) -> Refusal:
    return Refusal(Reason.UNAVAILABLE, f"storage: S3 cannot be used now, {why}; try again later")
