"""Boot image of a machine."""

from __future__ import annotations

import functools

from ...accelerators import Accelerator
from ...core.records import dataclass
from ...errors import ProviderError
from ...values.machine import Offer
from .clients import Clients, clients
from .failures import translated
from .settings import Ec2Settings

_CANONICAL = "099720109477"
_DEBIAN = "136693071363"
_UBUNTU_NAMES = {"20.04": "focal", "22.04": "jammy", "24.04": "noble", "26.04": "*"}

# Sources: NVIDIA, open-gpu-kernel-modules: Turing and later. AWS, "Neuron DLAMI User Guide": no Inf1 since 2.26.1.
_TOO_OLD = ("K80", "M60", "V100", "Inferentia1")


@dataclass(frozen=True, kw_only=True)
class BootImage:
    id: str
    root_device: str
    more_devices: tuple[str, ...] = ()
    """Device names of the other EBS volumes in the image."""


@dataclass(frozen=True)
class _Wanted:
    """Search for an image: a public SSM parameter first, then the newest image of `owner` by this name."""

    parameter: str
    owner: str = ""
    name: str = ""


def has_driver(aws: Ec2Settings, accelerator: Accelerator) -> bool:
    """Return whether the image that such a machine boots includes the driver for its devices."""
    if aws.ami:
        return True
    vendor = accelerator.metadata.get("vendor")
    return aws.system == "ubuntu" and vendor in ("nvidia", "aws") and accelerator.name not in _TOO_OLD


def image_for(api: Clients, aws: Ec2Settings, offer: Offer) -> BootImage:
    """Find the configured image, or the current image of the system for the offer's processor and devices.

    Raises:
        ProviderError: no image was found; `AWS(ami=...)` must name one.
    """
    if aws.ami:
        return _described(aws.region, aws.profile, aws.endpoint_url, aws.ami)
    wanted = _wanted(aws, offer)
    return _found(aws.region, aws.profile, aws.endpoint_url, wanted)


def _wanted(aws: Ec2Settings, offer: Offer) -> _Wanted:
    arch = "arm64" if offer.architecture == "arm64" else "amd64"
    vendor = offer.accelerator.metadata.get("vendor") if offer.accelerator is not None else None
    release = aws.ubuntu_version
    if aws.system == "ubuntu" and vendor == "nvidia":
        # Source: AWS Deep Learning AMIs, "Base OSS Nvidia Driver GPU AMI": drivers and CUDA, no frameworks.
        cpu = "arm64" if arch == "arm64" else "x86_64"
        return _Wanted(f"/aws/service/deeplearning/ami/{cpu}/base-oss-nvidia-driver-gpu-ubuntu-{release}/latest/ami-id")
    if aws.system == "ubuntu" and vendor == "aws":
        # Source: AWS Neuron, "Neuron DLAMI", SSM parameters.
        return _Wanted(f"/aws/service/neuron/dlami/multi-framework/ubuntu-{release}/latest/image_id")
    if aws.system == "debian":
        # Source: Debian wiki, Cloud/AmazonEC2Image.
        return _Wanted(f"/aws/service/debian/release/12/latest/{arch}", _DEBIAN, f"debian-12-{arch}-*")
    # Source: Canonical, "Find Ubuntu images with the SSM parameter store".
    return _Wanted(
        f"/aws/service/canonical/ubuntu/server/{release}/stable/current/{arch}/hvm/ebs-gp3/ami-id",
        _CANONICAL,
        f"ubuntu/images/hvm-ssd*/ubuntu-{_UBUNTU_NAMES.get(release, '*')}-{release}-{arch}-server-*",
    )


# Cached for the whole process: "current" must not change, because replacements must boot the same image as the others.
@functools.lru_cache(maxsize=64)
def _found(region: str, profile: str | None, endpoint_url: str | None, wanted: _Wanted) -> BootImage:
    api = clients(region, profile, endpoint_url)
    try:
        with translated("GetParameter"):
            image = str(api.ssm.get_parameter(Name=wanted.parameter)["Parameter"]["Value"])
    except ProviderError as error:
        image = _newest(api, wanted)
        if not image:
            raise ProviderError(
                f"aws: {region} has no image {wanted.parameter} ({error}); name one: AWS(ami='ami-...')"
            ) from error
    return _described(region, profile, endpoint_url, image)


def _newest(api: Clients, wanted: _Wanted) -> str:
    if not wanted.owner:
        return ""
    with translated("DescribeImages"):
        images = api.ec2.describe_images(
            Owners=[wanted.owner],
            Filters=[{"Name": "name", "Values": [wanted.name]}, {"Name": "state", "Values": ["available"]}],
        )["Images"]
    newest = max(images, key=lambda image: image.get("CreationDate", ""), default=None)
    return newest["ImageId"] if newest is not None else ""


@functools.lru_cache(maxsize=64)
def _described(region: str, profile: str | None, endpoint_url: str | None, image: str) -> BootImage:
    with translated("DescribeImages"):
        images = clients(region, profile, endpoint_url).ec2.describe_images(ImageIds=[image])["Images"]
    if not images:
        raise ProviderError(
            f"aws: ami={image!r} does not exist in {region}, or this account may not use it; name another image"
        )
    root = images[0].get("RootDeviceName") or "/dev/sda1"
    volumes = [disk["DeviceName"] for disk in images[0].get("BlockDeviceMappings", []) if "Ebs" in disk]
    return BootImage(id=image, root_device=root, more_devices=tuple(name for name in volumes if name != root))
