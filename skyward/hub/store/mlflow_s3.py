"""Files of MLflow's runs in S3. Needs the extra `hub-s3`.

The bucket is reached as MLflow reaches it: MLFLOW_S3_ENDPOINT_URL, and keys and region as boto3 finds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ...errors import UsageError
from ..model.foreign import ForeignFile
from ..model.refusal import Reason, Refusal
from .blobs import PIECE

ENDPOINT_VARIABLE = "MLFLOW_S3_ENDPOINT_URL"


class MlflowS3:
    """Buckets that this machine's credentials can read. Nothing is written."""

    def __init__(self) -> None:
        endpoint = os.environ.get(ENDPOINT_VARIABLE) or None
        config = Config(
            retries={"total_max_attempts": 3, "mode": "standard"},
            s3={"addressing_style": "path" if endpoint else "auto"},
            response_checksum_validation="when_required",  # not every service knows the newer checksums
            user_agent_extra="skyward",
        )
        try:
            self._client: Any = boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"{ENDPOINT_VARIABLE}={endpoint!r}: {error}; write it as https://HOST") from None

    def files(self, uri: str) -> Iterator[ForeignFile]:
        """Yield the objects below an address `s3://bucket/key`.

        Raises:
            Refusal: S3 refuses it.
            UsageError: S3 does not answer, or there are no credentials.
        """
        address = urlsplit(uri)
        prefix = f"{address.path.strip('/')}/"
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=address.netloc, Prefix=prefix)
        try:
            for page in pages:
                for item in page.get("Contents", []):
                    if not item["Key"].endswith("/"):  # a folder, as consoles make them
                        read = partial(self._read, address.netloc, item["Key"])
                        yield ForeignFile(item["Key"][len(prefix) :], item["Size"], read)
        except (ClientError, BotoCoreError) as error:
            raise _problem(uri, error) from error

    def _read(self, bucket: str, key: str) -> Iterator[bytes]:
        try:
            body = self._client.get_object(Bucket=bucket, Key=key)["Body"]
            try:
                yield from body.iter_chunks(PIECE)
            finally:
                body.close()
        except (ClientError, BotoCoreError) as error:
            raise _problem(f"s3://{bucket}/{key}", error) from error


def _problem(uri: str, error: ClientError | BotoCoreError) -> Refusal | UsageError:
    if isinstance(error, ClientError):
        return Refusal(Reason.INVALID, f"artifacts={uri!r}: cannot be read ({error}); check the keys")
    return UsageError(f"artifacts={uri!r}: S3 cannot be used: {error}; check {ENDPOINT_VARIABLE} and the keys")
