"""What AWS and botocore raise, as errors of ours: one table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...errors import AuthFailed, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled

__all__ = ["EXPIRED", "NotThere", "NotYet", "code_of", "soon_there", "translated"]


class NotThere(ProviderError):
    """It names something that does not exist, or not yet."""


class NotYet(Throttled):
    """It names something that was made a moment ago, and that is not known everywhere yet: nothing was done."""


@contextlib.contextmanager
def soon_there() -> Iterator[None]:
    """For calls that name only what was made a moment ago: NotThere is NotYet.

    Source: EC2 API, "Eventual consistency": what is made may be unknown to the next calls for a while.
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
            "InsufficientFreeAddressesInSubnet",  # each zone has a subnet of its own
            "InsufficientAddressCapacity",
            "SpotMaxPriceTooLow",
            "UnfulfillableCapacity",
            "Unsupported",  # this type is not offered in this zone
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
            "IncorrectInstanceState",  # terminate, while it is pending
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
        "These credentials may not make this call: guides/aws.md lists what a policy must allow",
    ),
    **dict.fromkeys(EXPIRED, "The credentials have expired: renew them (aws sso login)"),
    **dict.fromkeys(
        ("RequestExpired", "SignatureDoesNotMatch", "InvalidSignatureException"),
        "Is the clock of this machine right? Then the secret key is wrong",
    ),
    **dict.fromkeys(
        ("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId"),
        "The key is wrong or was removed, this machine's clock is wrong, or the account has not enabled this region",
    ),
    "OptInRequired": "It must be subscribed to first, in the AWS console; or AWS(ami=...) names another image",
    "PendingVerification": "AWS looks at new accounts for some hours: try again later",
}
_ENCODED = "Encoded authorization failure message:"


def code_of(error: BaseException) -> str:
    """AWS's own name of a failure; "" where it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of AWS and of the way there, raised inside, as ours; `what` is the operation, for the message."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        yield
    except boto.ClientError as error:
        raise _of_answer(what, error) from error
    except (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.ProfileNotFound,
        boto.TokenRetrievalError,
        boto.SSOError,
        boto.CredentialRetrievalError,
        boto.InvalidConfigError,
    ) as e:
        # The message says all of it: botocore's chain of causes is a hundred lines about where it looked.
        raise AuthFailed(
            f"aws: {what}: {e}; `aws configure`, the environment variables AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS(profile=...) give credentials"
        ) from None
    except (boto.ParamValidationError, boto.UnknownServiceError, boto.NoRegionError) as error:
        raise ProviderError(f"aws: {what}: {error}") from error
    except boto.EndpointConnectionError as error:
        raise OutcomeUnknown(
            f"aws: {what}: {error}; is this machine online, and AWS(region=...) the name of a region?"
        ) from error
    except ResponseParserError as error:  # a page of a proxy's, most likely: it is no BotoCoreError
        answer = str(error).partition("\n")[2][:200] or str(error)
        raise OutcomeUnknown(
            f"aws: {what}: the answer is none of AWS's: {answer}; is there a proxy or a sign-in page in between?"
        ) from error
    except boto.BotoCoreError as error:  # the connection: whether the request arrived nobody knows
        raise OutcomeUnknown(f"aws: {what}: {error}") from error


def _of_answer(what: str, error: Any) -> ProviderError:
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    reason = str(error.response.get("Error", {}).get("Message", "")).partition(_ENCODED)[0].rstrip()
    message = f"aws: {what}: {code}: {reason}".rstrip(": ")
    kind = _BY_CODE.get(code)
    if kind is None and code.endswith((".NotFound", ".Unknown", ".Malformed")):
        kind = NotThere
    if kind is None and status >= 500:
        kind = OutcomeUnknown
    if kind is QuotaExceeded:
        message += ". AWS raises quotas on request: Service Quotas, Amazon EC2"
    if code in _ADVICE:
        message = f"{message.rstrip('.')}. {_ADVICE[code]}"
    return (kind or ProviderError)(message, code=code)
