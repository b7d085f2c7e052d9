"""Clients of the AWS APIs, created once per account and region and shared by threads."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependency
from .failures import EXPIRED, translated

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

_CONNECT_S = 10
_READ_S = 60
_PRICING_REGION = "us-east-1"  # only a few regions host the Pricing API; each answers for all regions


class Clients:
    """EC2, STS, SSM and Pricing clients. Each call is tried once: retries belong to the layer that has the journal."""

    def __init__(self, region: str, profile: str | None, endpoint_url: str | None) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise MissingDependency(
                f"AWS: needs an optional package ({error}); run `pip install 'skyward[aws]'`", name=error.name
            ) from error
        self._config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            user_agent_extra="skyward",
        )
        self._endpoint_url = endpoint_url
        self._region = region
        self._profile = profile
        self._lock = threading.RLock()
        self._made: dict[tuple[str, str], Any] = {}
        self._boto3 = boto3
        self._session = self._new_session()

    @property
    def ec2(self) -> EC2Client:
        client: EC2Client = self._client("ec2", self._region)
        return client

    @property
    def sts(self) -> Any:
        return self._client("sts", self._region)

    @property
    def ssm(self) -> Any:
        return self._client("ssm", self._region)

    @property
    def pricing(self) -> Any:
        return self._client("pricing", _PRICING_REGION)

    @functools.cached_property
    def account(self) -> str:
        """Number of the account that the credentials belong to. Raises AuthFailed."""
        with translated("GetCallerIdentity"):
            return str(self.sts.get_caller_identity()["Account"])

    def close(self) -> None:
        with self._lock:
            for client in self._made.values():
                client.close()
            self._made.clear()

    def _new_session(self) -> Any:
        with translated("credentials"):
            session = self._boto3.session.Session(profile_name=self._profile, region_name=self._region)
        session.events.register("after-call", self._look_for_new_credentials)
        return session

    def _look_for_new_credentials(self, parsed: dict[str, Any], **_: Any) -> None:
        """Start a new session when the credentials have expired: the user may renew them while the program runs."""
        if parsed.get("Error", {}).get("Code") not in EXPIRED:
            return
        with self._lock:  # threads that hold old clients may finish their call with them
            self._made.clear()
            self.__dict__.pop("account", None)
            self._session = self._new_session()

    def _client(self, service: str, region: str) -> Any:
        with self._lock:  # sessions are not thread-safe; clients are
            if (service, region) not in self._made:
                with translated(service):
                    self._made[service, region] = self._session.client(
                        service, region_name=region, endpoint_url=self._endpoint_url, config=self._config
                    )
            return self._made[service, region]


@functools.lru_cache(maxsize=32)
def clients(region: str, profile: str | None, endpoint_url: str | None) -> Clients:
    """Return the shared clients of this region, profile and endpoint."""
    return Clients(region, profile, endpoint_url)
