"""Contents of files as objects of a bucket. The service and the credentials are found as by other clients of AWS."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO
from urllib.parse import urlsplit

from protos.errors import Misconfigured, NotFound, Unavailable
from protos.hints import extra_command
from router.files.contents import ABANDONED_S

_SETTING = "router.batch.folder"
_OURS = re.compile(r"file-[0-9a-f]{24}")
"""Ids of files, as `new_id` makes them: a sweep leaves all else in the bucket alone."""


class S3Contents:
    """Called from threads. Raises Misconfigured for a bucket that cannot be used, or without the package boto3."""

    def __init__(self, url: str) -> None:
        """`url`: s3://BUCKET/PREFIX."""
        parts = urlsplit(url)
        self._bucket, prefix = parts.netloc, parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise Misconfigured(
                f"{_SETTING}: {url} needs the package boto3: {extra_command('s3')}", param=_SETTING
            ) from error
        if not self._bucket or not prefix:
            missing = "prefix" if self._bucket else "bucket"
            raise Misconfigured(f"{_SETTING}: {url} has no {missing}: give s3://BUCKET/PREFIX", param=_SETTING)
        config = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3})
        try:
            self._client = boto3.session.Session().client("s3", config=config)
            self._client.head_bucket(Bucket=self._bucket)
        except (BotoCoreError, ClientError, ValueError) as error:
            raise Misconfigured(
                f"{_SETTING}: {url}: {error}: give a bucket that exists, and AWS_ENDPOINT_URL_S3, AWS_REGION, "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY as it needs them",
                param=_SETTING,
            ) from error

    def store(self, file_id: str, content: IO[bytes]) -> None:
        from boto3.s3.transfer import TransferConfig

        content.seek(0)
        with _answered():  # removes the parts of a failed copy
            self._client.upload_fileobj(
                content, self._bucket, self._prefix + file_id, Config=TransferConfig(use_threads=False)
            )

    def read(self, file_id: str, start: int, size: int) -> bytes:
        where = {"Bucket": self._bucket, "Key": self._prefix + file_id}
        with _answered({"NoSuchKey": NotFound(f"the content of file {file_id} has been deleted")}):
            try:
                found = self._client.get_object(**where, Range=f"bytes={start}-{start + size - 1}")
            except self._client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] == "InvalidRange":  # after the file's end
                    return b""
                raise
            with found["Body"] as body:
                data: bytes = body.read()
            return data

    def delete(self, file_id: str) -> None:
        with _answered():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + file_id)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        oldest_s = time.time() - ABANDONED_S
        where = {"Bucket": self._bucket, "Prefix": self._prefix}
        with _answered():
            for page in self._client.get_paginator("list_objects_v2").paginate(**where):
                for one in page.get("Contents", ()):
                    name = one["Key"].removeprefix(self._prefix)
                    is_old = one["LastModified"].timestamp() < oldest_s
                    if is_old and _OURS.fullmatch(name) and not is_known(name):
                        self._client.delete_object(Bucket=self._bucket, Key=one["Key"])
            for page in self._client.get_paginator("list_multipart_uploads").paginate(**where):
                for one in page.get("Uploads", ()):
                    name = one["Key"].removeprefix(self._prefix)
                    if one["Initiated"].timestamp() < oldest_s and _OURS.fullmatch(name):
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"]
                        )


@contextmanager
def _answered(known: dict[str, Exception] | None = None) -> Iterator[None]:
    """Raises the error that is `known` by its code, and Unavailable for others."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        found = (known or {}).get(error.response["Error"]["Code"])
        raise found or Unavailable(f"files cannot be read or written now: {error}") from error
    except (BotoCoreError, OSError) as error:
        raise Unavailable(f"files cannot be read or written now: {error}") from error
