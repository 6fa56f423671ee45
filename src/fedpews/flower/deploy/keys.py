"""Certificates and keys: a trial authority, the SuperLink's own on loopback, sites' keys and their fingerprints."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpews.errors import ConfigError

DAYS = 30
YEARS = 3650
"""Days for a certificate that never leaves this machine, whose authority's key is not kept."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's certificate, its key, and the authority that the others trust."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> ServerKeys:
        return cls(folder / "ca.crt", folder / "server.pem", folder / "server.key")


def make_server_keys(folder: Path, host: str = "127.0.0.1", days: int = DAYS) -> ServerKeys:
    """Make an authority and a certificate for ``host``; the authority's own key is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = ServerKeys.in_folder(folder)
    root_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root_name = _name("fedpews trial authority")
    root = (
        _certificate(root_name, root_name, root_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root_key, hashes.SHA384())
    )
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    server = (
        _certificate(_name(host), root_name, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(root_key, hashes.SHA384())
    )
    keys.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    keys.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_key(keys.key, key, serialization.PrivateFormat.TraditionalOpenSSL)
    return keys


def make_site_authority(folder: Path) -> ServerKeys:
    """The authority that signs sites' certificates, in a coordinator's folder; made at first use."""
    path = folder / "sites"
    keys = ServerKeys(path / "ca.crt", path / "ca.crt", path / "ca.key")
    if not keys.key.exists():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, name = ec.generate_private_key(ec.SECP384R1()), _name("fedpews sites")
        root = (
            _certificate(name, name, key.public_key(), YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA384())
        )
        keys.certificate.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        _write_key(keys.key, key, serialization.PrivateFormat.PKCS8)
    return keys


def issue_site_certificate(folder: Path, public_key: Path, site: int, days: int = 365) -> Path:
    """A certificate for a site's public key (OpenSSH's layout), with which the proxy lets it in."""
    authority = make_site_authority(folder)
    root = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    signer = serialization.load_pem_private_key(authority.key.read_bytes(), None)
    own = serialization.load_ssh_public_key(public_key.read_bytes())
    if not isinstance(own, ec.EllipticCurvePublicKey) or not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{public_key} is no ECDSA key: ssh-keygen -t ecdsa -b 384")
    signed = (
        _certificate(_name(f"site-{site}"), root.subject, own, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(signer, hashes.SHA384())
    )
    path = authority.certificate.with_name(f"site-{site}.crt")
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return path


def pem_key(private: Path) -> bytes:
    """A site's private key in the layout that TLS libraries read."""
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_site_key(folder: Path, site: int) -> tuple[Path, Path]:
    """Make a site's private and public key, as ``ssh-keygen -t ecdsa -b 384`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / f"site-{site}", folder / f"site-{site}.pub"
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(private, key, serialization.PrivateFormat.OpenSSH)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return private, public


def fingerprint(public_key: bytes) -> str:
    """A public key in short, as ``ssh-keygen -lf site-0.pub`` shows it; the key is in OpenSSH's or PEM layout."""
    is_pem = public_key.lstrip().startswith(b"-----")
    read = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key
    line = read(public_key).public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, layout: serialization.PrivateFormat) -> None:
    write_private(path, key.private_bytes(serialization.Encoding.PEM, layout, serialization.NoEncryption()))


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
