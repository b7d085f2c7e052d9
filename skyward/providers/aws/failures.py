"""One table that translates errors of AWS and botocore into skyward's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...errors import AuthFailed, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled


class NotThere(ProviderError):
    """The request names a resource that does not exist, or not yet."""


class NotYet(Throttled):
    """The request names a resource that is too new to be known everywhere; nothing was done."""


@contextlib.contextmanager
def soon_there() -> Iterator[None]:
    """Turn NotThere into NotYet, for calls that name only resources created a moment ago.

    Source: EC2 API, "Eventual consistency": new resources may be unknown to the next calls for a while.
    """
    try:
        yield
    except NotThere as error:
        raise NotYet(str(error), code=error.code) from error


# Source: Amazon EC2 API reference, "Error codes for the Amazon EC2 API".
_BY_CODE: dict[str, type[ProviderError]] = {
    **dict.fromkeys(
        (
            "InsufficientInstanceCapacity",
            "InsufficientHostCapacity",
            "InsufficientReservedInstanceCapacity",
            "InsufficientCapacityOnHost",
            "InsufficientCapacity",
            "InsufficientFreeAddressesInSubnet",  # each zone has its own subnet
            "InsufficientAddressCapacity",
            "SpotMaxPriceTooLow",
            "UnfulfillableCapacity",
            "Unsupported",  # the type is not offered in this zone
            "UnsupportedOperation",
        ),
        NoCapacity,
    ),
    **dict.fromkeys(
        (
            "InstanceLimitExceeded",
            "VcpuLimitExceeded",
            "MaxSpotInstanceCountExceeded",
            "SpotMaxCountExceeded",
            "VolumeLimitExceeded",
            "SecurityGroupLimitExceeded",
            "PlacementGroupLimitExceeded",
        ),
        QuotaExceeded,
    ),
    **dict.fromkeys(
        (
            "RequestLimitExceeded",
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "TooManyRequestsException",
            "EC2ThrottledException",
            "IncorrectInstanceState",  # a terminate request while the instance is pending
            "IncorrectState",
            "ResourceCountExceeded",
        ),
        Throttled,
    ),
    **dict.fromkeys(
        (
            "AccessDenied",
            "AccessDeniedException",
            "AuthFailure",
            "Blocked",
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidAccessKeyId",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "MissingAuthenticationToken",
            "OptInRequired",
            "PendingVerification",
            "RequestExpired",
            "SignatureDoesNotMatch",
            "UnauthorizedOperation",
            "UnrecognizedClientException",
        ),
        AuthFailed,
    ),
    **dict.fromkeys(("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"), OutcomeUnknown),
}

EXPIRED = ("ExpiredToken", "ExpiredTokenException")
_ADVICE = {
    **dict.fromkeys(
        ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"),
        "These credentials may not make this call; grant the permissions listed in guides/aws.md",
    ),
    **dict.fromkeys(EXPIRED, "The credentials have expired; renew them (aws sso login)"),
    **dict.fromkeys(
        ("RequestExpired", "SignatureDoesNotMatch", "InvalidSignatureException"),
        "This machine's clock or the secret key is wrong; check the clock first",
    ),
    **dict.fromkeys(
        ("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId"),
        "The key is wrong or deleted, this machine's clock is wrong, or the region is not enabled; check these",
    ),
    "OptInRequired": "The image needs a subscription; subscribe in the AWS console, or name another with AWS(ami=...)",
    "PendingVerification": "AWS verifies new accounts for some hours; retry later",
}
_REFUSED = "check the options of AWS(...) against this message"
_UNKNOWN = "AWS may have carried it out all the same; retry, then run `skyward gc`, which ends leftover machines"
_BY_KIND: dict[type[ProviderError], str] = {
    NoCapacity: "try another zone, region or machine type",
    QuotaExceeded: "request a higher quota in the AWS console: Service Quotas, Amazon EC2",
    Throttled: "retry later",
    AuthFailed: "check the account and its keys in the AWS console",
    OutcomeUnknown: _UNKNOWN,
    NotThere: "check the name, and that it is of this region",
    ProviderError: _REFUSED,
}
"""What to do where a code has no advice of its own."""
_ENCODED = "Encoded authorization failure message:"


def code_of(error: BaseException) -> str:
    """Return AWS's own code of a failure, or "" if it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def translated(operation: str) -> Iterator[None]:
    """Translate errors of AWS and of the connection to it, raised inside, into skyward's."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        yield
    except boto.ClientError as error:
        raise _of_answer(operation, error) from error
    except (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.ProfileNotFound,
        boto.TokenRetrievalError,
        boto.SSOError,
        boto.CredentialRetrievalError,
        boto.InvalidConfigError,
    ) as e:
        # Without the cause: botocore's chain adds a hundred lines about the places it searched, and no fact.
        raise AuthFailed(
            f"aws: {operation}: {e}; run `aws configure`, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
            "profile with AWS(profile=...)"
        ) from None
    except (boto.ParamValidationError, boto.UnknownServiceError, boto.NoRegionError) as error:
        raise ProviderError(f"aws: {operation}: {error}; {_REFUSED}") from error
    except boto.EndpointConnectionError as error:
        raise OutcomeUnknown(
            f"aws: {operation}: {error}; check that this machine is online and AWS(region=...) is a region, then retry"
        ) from error
    except ResponseParserError as error:  # not a BotoCoreError; most likely a page of a proxy
        answer = str(error).partition("\n")[2][:200] or str(error)
        raise OutcomeUnknown(
            f"aws: {operation}: the answer is not from AWS: {answer}; check for a proxy or a sign-in page, then retry"
        ) from error
    except boto.BotoCoreError as error:  # the connection failed, so the request may or may not have arrived
        raise OutcomeUnknown(f"aws: {operation}: {error}; {_UNKNOWN}") from error


def _of_answer(operation: str, error: Any) -> ProviderError:
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    reason = str(error.response.get("Error", {}).get("Message", "")).partition(_ENCODED)[0].rstrip()
    message = f"aws: {operation}: {code}: {reason}".rstrip(": ")
    kind = _BY_CODE.get(code)
    if kind is None and code.endswith((".NotFound", ".Unknown", ".Malformed")):
        kind = NotThere
    if kind is None and status >= 500:
        kind = OutcomeUnknown
    kind = kind or ProviderError
    message = message.rstrip(".")
    message = f"{message}. {_ADVICE[code]}" if code in _ADVICE else f"{message}; {_BY_KIND[kind]}"
    return kind(message, code=code)
