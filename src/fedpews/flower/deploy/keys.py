"""Certificates and keys: a trial authority, the SuperLink's own on loopback, sites' keys and their fingerprints."""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpews.errors import ConfigError

DAYS = 30
YEARS = 3650
"""Days for a certificate that never leaves this machine, whose authority's key is not kept."""
TRIAL_AUTHORITY, SITE_AUTHORITY = "fedpews trial authority", "fedpews sites"


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
    signer, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    _write_certificate(keys.authority, TRIAL_AUTHORITY, signer.public_key(), TRIAL_AUTHORITY, signer, days)
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    names = [x509.DNSName("localhost"), address]
    _write_certificate(keys.certificate, host, key.public_key(), TRIAL_AUTHORITY, signer, days, names)
    _write_key(keys.key, key, serialization.PrivateFormat.TraditionalOpenSSL)
    return keys


def make_site_authority(folder: Path) -> ServerKeys:
    """The authority that signs sites' certificates, in a coordinator's folder; made at first use."""
    path = folder / "sites"
    keys = ServerKeys(path / "ca.crt", path / "ca.crt", path / "ca.key")
    if not keys.key.exists():
        make_private(path)
        key = ec.generate_private_key(ec.SECP384R1())
        _write_certificate(keys.certificate, SITE_AUTHORITY, key.public_key(), SITE_AUTHORITY, key, YEARS)
        _write_key(keys.key, key, serialization.PrivateFormat.PKCS8)
    return keys


def issue_site_certificate(folder: Path, public_key: Path, site: int, days: int = 365) -> Path:
    """A certificate for a site's public key (OpenSSH's layout), with which the proxy lets it in."""
    authority = make_site_authority(folder)
    signer: Any = serialization.load_pem_private_key(authority.key.read_bytes(), None)
    key = serialization.load_ssh_public_key(public_key.read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{public_key} is no ECDSA key: ssh-keygen -t ecdsa -b 384")
    path = authority.certificate.with_name(f"site-{site}.crt")
    _write_certificate(path, f"site-{site}", key, SITE_AUTHORITY, signer, days)
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
    key: Any = (serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key)(
        public_key
    )
    digest = serialization.ssh_key_fingerprint(key, hashes.SHA256())
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def make_private(folder: Path) -> Path:
    """A folder that only its owner may read, made if it does not exist."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, layout: serialization.PrivateFormat) -> None:
    write_private(path, key.private_bytes(serialization.Encoding.PEM, layout, serialization.NoEncryption()))


def _write_certificate(
    path: Path,
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    names: Sequence[x509.GeneralName] = (),
) -> None:
    """Write a certificate for a key; one that signs itself is an authority's."""
    is_authority, now = subject == issuer, datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=_name(issuer),
        subject_name=_name(subject),
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(hours=1),
        not_valid_after=now + timedelta(days=days),
    ).add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    path.write_bytes(builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
