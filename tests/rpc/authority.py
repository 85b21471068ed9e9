"""A certificate authority for tests: short-lived keys, written as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

LOOPBACK = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


def uri(name: str) -> x509.GeneralName:
    """Return a URI for a subject alternative name."""
    return x509.UniformResourceIdentifier(name)


def dns(name: str) -> x509.GeneralName:
    """Return a DNS name for a subject alternative name."""
    return x509.DNSName(name)


class Authority:
    """Signs certificates. `pem` is its own."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(self._name, self._key.public_key(), names=(), is_authority=True)
        self.pem = certificate.public_bytes(Encoding.PEM)

    def issue(self, common_name: str, *names: x509.GeneralName) -> tuple[bytes, bytes]:
        """Return certificate and private key with these subject alternative names, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        certificate = self._sign(subject, key.public_key(), names=names, is_authority=False)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private

    def write_server(self, folder: Path, common_name: str = "server") -> tuple[Path, Path]:
        """Write a certificate for loopback and its key into `folder`; return their paths."""
        certificate, key = self.issue(common_name, *LOOPBACK)
        paths = folder / "server.pem", folder / "server.key"
        for path, content in zip(paths, (certificate, key), strict=True):
            path.write_bytes(content)
            path.chmod(0o600)
        return paths

    def _sign(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        *,
        names: tuple[x509.GeneralName, ...],
        is_authority: bool,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())
