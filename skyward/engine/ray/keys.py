"""Keys of the Ray of one pool: a certificate authority that only the client has, and a pair for each node."""

from __future__ import annotations

import datetime
import ipaddress
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
"""The keys end with the pool. Clocks of machines may be wrong, so no certificate may look expired."""
_LOOPBACK: Final = ipaddress.ip_address("127.0.0.1")


class KeyPair(NamedTuple):
    """Certificate and key of a node, as PEM."""

    certificate: str
    key: str


class Authority:
    """Certificate authority of one Ray, or of the transfers of one pool. Its key is never written down.

    Args:
        pair: The `own_pair` of an authority that another process has made; None to make a new one.
    """

    def __init__(self, pair: KeyPair | None = None) -> None:
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyward")])
        if pair is not None:
            key = load_pem_private_key(pair.key.encode(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key, self._certificate = key, x509.load_pem_x509_certificate(pair.certificate.encode())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = self._signed(self._name, self._key, basic, critical=True)

    @property
    def certificate(self) -> str:
        """The authority's own certificate, as PEM."""
        return _pem(self._certificate)

    @property
    def own_pair(self) -> KeyPair:
        """The authority's certificate with its key, for those who trust only holders of that key."""
        return KeyPair(self.certificate, _key_pem(self._key))

    def pair_for(self, address: str) -> KeyPair:
        """Make the pair of the node with an IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = dict.fromkeys((ipaddress.ip_address(address), _LOOPBACK))
        names = [*map(x509.IPAddress, addresses), x509.DNSName("localhost")]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, address)])
        certificate = self._signed(subject, key, x509.SubjectAlternativeName(names), critical=False)
        return KeyPair(_pem(certificate), _key_pem(key))

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType, *, critical: bool
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_FROM)
            .not_valid_after(_UNTIL)
            .add_extension(extension, critical=critical)
        )
        return builder.sign(self._key, hashes.SHA256())


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
