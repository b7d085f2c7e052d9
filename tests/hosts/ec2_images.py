"""The images of the fake EC2, in every region, and the public parameters that name them. All boot our Debian."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["IMAGES", "PARAMETERS", "Image", "image_of", "write_images"]

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Image:
    """An AMI. `user` is the user whom the instance's key pair lets in."""

    name: str
    owner: str
    user: str
    architecture: str
    root_device: str
    parameters: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"ami-{hashlib.sha256(self.name.encode()).hexdigest()[:17]}"


def _images() -> list[Image]:
    found = []
    for debian_name, architecture in _ARCHITECTURES.items():
        for release, word in {"22.04": "jammy", "24.04": "noble"}.items():
            at = f"/aws/service/canonical/ubuntu/server/{release}/stable/current/{debian_name}/hvm"
            found.append(
                Image(
                    name=f"ubuntu/images/hvm-ssd-gp3/ubuntu-{word}-{release}-{debian_name}-server-20260101",
                    owner="099720109477",
                    user="ubuntu",
                    architecture=architecture,
                    root_device="/dev/sda1",
                    parameters=(f"{at}/ebs-gp3/ami-id", f"{at}/ebs-gp2/ami-id"),
                )
            )
            learning = f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-{release}"
            found.append(
                Image(
                    name=f"Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu {release}) {architecture} 20260101",
                    owner="898082745236",
                    user="ubuntu",
                    architecture=architecture,
                    root_device="/dev/sda1",
                    parameters=(f"{learning}/latest/ami-id",),
                )
            )
        found.append(
            Image(
                name=f"debian-12-{debian_name}-20260101-1",
                owner="136693071363",
                user="admin",
                architecture=architecture,
                root_device="/dev/xvda",
                parameters=(f"/aws/service/debian/release/12/latest/{debian_name}",),
            )
        )
        found.append(
            Image(
                name=f"al2023-ami-2023.1.20260101.0-kernel-6.1-{architecture}",
                owner="137112412989",
                user="ec2-user",
                architecture=architecture,
                root_device="/dev/xvda",
                parameters=(
                    f"/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{architecture}",
                    f"/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-6.1-{architecture}",
                ),
            )
        )
    for release in ("22.04", "24.04"):
        found.append(
            Image(
                name=f"Deep Learning AMI Neuron (Ubuntu {release}) 20260101",
                owner="898082745236",
                user="ubuntu",
                architecture="x86_64",
                root_device="/dev/sda1",
                parameters=(f"/aws/service/neuron/dlami/multi-framework/ubuntu-{release}/latest/image_id",),
            )
        )
    return found


IMAGES = {image.id: image for image in _images()}
PARAMETERS = {name: image.id for image in IMAGES.values() for name in image.parameters}


def image_of(ami: str) -> Image:
    """Return the image of an id. Raises KeyError."""
    return IMAGES[ami]


def write_images(path: Path) -> None:
    """Write them as moto reads them (MOTO_AMIS_PATH)."""
    entries = [
        {
            "ami_id": image.id,
            "name": image.name,
            "description": image.name,
            "owner_id": image.owner,
            "state": "available",
            "public": True,
            "image_location": f"{image.owner}/{image.name}",
            "image_type": "machine",
            "architecture": image.architecture,
            "virtualization_type": "hvm",
            "hypervisor": "xen",
            "root_device_name": image.root_device,
            "root_device_type": "ebs",
            "creation_date": "2026-01-01T00:00:00.000Z",
        }
        for image in IMAGES.values()
    ]
    path.write_text(json.dumps(entries))
