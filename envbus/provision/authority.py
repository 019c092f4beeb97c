"""Certificates in memory: an authority, and what it signs. The only importer of cryptography."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from envbus.errors import UsageError

AUTHORITY_DAYS = 5 * 365
LEAF_DAYS = 397
"""Of NATS and of users: the most that browsers take."""
RENEW_DAYS = 30
"""A certificate that ends sooner is no longer good."""
_BACKDATED = timedelta(hours=1)
"""For clocks that are behind."""
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, as PEM."""

    certificate: str
    key: str = field(repr=False)


def new_authority() -> Issued:
    """Return a new authority, which signs itself."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "envbus NATS authority")])
    builder = _builder(name, key.public_key(), days=AUTHORITY_DAYS).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _issued(builder.sign(key, hashes.SHA256()), key)


class Authority:
    """Signs certificates.

    Args:
        certificate: Its own, PEM.
        key: Its private key, PEM.

    Raises:
        UsageError: They are not that, or the certificate ends soon.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate = _parse(certificate, "the authority's certificate")
        if _days_left(self._certificate) < RENEW_DAYS:
            raise UsageError(
                f"the authority's certificate ends on {self._certificate.not_valid_after_utc:%Y-%m-%d}; "
                "make a new one in another folder and hand its ca.pem to everybody"
            )
        try:
            loaded = load_pem_private_key(key.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UsageError("the authority's key is not a private key in PEM without a passphrase") from error
        if not isinstance(loaded, (EllipticCurvePrivateKey, RSAPrivateKey)):
            raise UsageError("the authority's key must be an EC or RSA key")
        self._key = loaded

    def for_server(self, hosts: Sequence[str]) -> Issued:
        """Return a certificate of a NATS server that is reached by these names and addresses.

        Raises:
            UsageError: One of them is neither.
        """
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        return self._sign(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names)

    def for_user(self, name: str) -> Issued:
        """Return a certificate for the clients of one user."""
        return self._sign(name, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _sign(self, name: str, use: x509.ObjectIdentifier, *extensions: x509.ExtensionType) -> Issued:
        key = generate_private_key(SECP256R1())
        common_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        builder = _builder(common_name, key.public_key(), days=LEAF_DAYS, until=self._certificate.not_valid_after_utc)
        builder = builder.issuer_name(self._certificate.subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(_issuer(self._certificate), critical=False)
        for extension in (x509.ExtendedKeyUsage([use]), *extensions):
            builder = builder.add_extension(extension, critical=False)
        return _issued(builder.sign(self._key, hashes.SHA256()), key)


def is_good(certificate: str, hosts: Sequence[str] | None) -> bool:
    """Whether a certificate lasts for a while yet, and is for just these hosts if they are given.

    Raises:
        UsageError: It is no certificate.
    """
    parsed = _parse(certificate, "the certificate")
    if _days_left(parsed) < RENEW_DAYS:
        return False
    if hosts is None:
        return True
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return set(names) == {_host(host) for host in hosts}


def _builder(
    subject: x509.Name, key: EllipticCurvePublicKey, *, days: int, until: datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC).replace(microsecond=0)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end if until is None else min(end, until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _issuer(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        known = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(certificate.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise UsageError(f"{host!r} is neither a host name nor an IP address") from None
        return x509.DNSName(host.lower())


def _issued(certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate.public_bytes(Encoding.PEM).decode(),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    )


def _parse(certificate: str, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate.encode())
    except ValueError as error:
        raise UsageError(f"{what} is not a certificate in PEM") from error


def _days_left(certificate: x509.Certificate) -> float:
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)
