"""Certificates: for whom, for how long, kept until they end; an authority of one's own; without cryptography."""

from __future__ import annotations

import importlib.util
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from envbus.errors import UsageError
from envbus.provision import authority, certificates


def parsed(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def days_left(certificate: x509.Certificate) -> float:
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def usage(certificate: x509.Certificate) -> x509.KeyUsage:
    return certificate.extensions.get_extension_for_class(x509.KeyUsage).value


def test_names_purposes_and_lifetimes(tmp_path: Path) -> None:
    certificates.make(tmp_path, hosts=["nats.example.org", "10.1.2.3"])
    certificates.for_user(tmp_path, "alice")
    ca, server, user = (parsed(tmp_path / name) for name in ("ca.pem", "server.pem", "users/alice.pem"))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"nats.example.org", "localhost"}
    assert ipaddress.ip_address("10.1.2.3") in names.get_values_for_type(x509.IPAddress)
    for leaf, purpose in ((server, "serverAuth"), (user, "clientAuth")):
        leaf.verify_directly_issued_by(ca)
        uses = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert [use._name for use in uses] == [purpose]
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not usage(leaf).key_cert_sign
        assert 390 < days_left(leaf) <= 397
    assert usage(ca).key_cert_sign
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert 1800 < days_left(ca) <= 1825


def test_nothing_outlasts_the_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "AUTHORITY_DAYS", 100)
    certificates.make(tmp_path)
    assert parsed(tmp_path / "server.pem").not_valid_after_utc == parsed(tmp_path / "ca.pem").not_valid_after_utc


def test_what_lasts_is_kept_and_what_ends_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ca.pem", "server.pem", "users/alice.pem")

    def again(**options: Any) -> list[str]:
        before = {name: (tmp_path / name).read_bytes() for name in names}
        certificates.make(tmp_path, **options)
        certificates.for_user(tmp_path, "alice")
        return [name for name in names if (tmp_path / name).read_bytes() != before[name]]

    certificates.make(tmp_path, hosts=["nats.example.org"])
    certificates.for_user(tmp_path, "alice")
    assert again() == []
    assert again(hosts=["nats.example.org"]) == []
    assert again(hosts=["other.example.org"]) == ["server.pem"]
    assert again(renew=True) == ["server.pem"]
    monkeypatch.setattr(authority, "RENEW_DAYS", 500)  # as if it were next year
    assert again() == ["server.pem", "users/alice.pem"]
    monkeypatch.setattr(authority, "RENEW_DAYS", 2000)
    with pytest.raises(UsageError, match="the authority's certificate ends on"):
        again()


def test_an_authority_of_ones_own(tmp_path: Path, certs: Path) -> None:
    """Without its key here: what is there is used, what is missing is named."""
    certificates.for_user(certs, "alice")
    (tmp_path / "users").mkdir()
    for name in ("ca.pem", "server.pem", "server.key", "users/alice.pem", "users/alice.key"):
        (tmp_path / name).write_bytes((certs / name).read_bytes())
    certificates.check(tmp_path)
    assert (
        certificates.for_user(tmp_path, "alice", renew=True)[0].read_bytes()
        == (certs / "users" / "alice.pem").read_bytes()
    )
    with pytest.raises(UsageError, match=r"no .*users/bob\.pem, and no .*ca\.key to issue it with"):
        certificates.for_user(tmp_path, "bob")


@pytest.mark.parametrize("host", ["", "two words", "a..b", "nats://host", "300.1.1.1/8"])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="is neither a host name nor an IP address"):
        certificates.make(tmp_path, hosts=[host])


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    certificates.make(tmp_path)
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(UsageError, match="the authority's key is not a private key"):
        certificates.make(tmp_path, renew=True)
    (tmp_path / "server.pem").write_text("no certificate")
    with pytest.raises(UsageError, match="is not a certificate in PEM"):
        certificates.make(tmp_path)


def test_the_key_of_an_authority_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("precious")
    with pytest.raises(UsageError, match=r"ca\.key is there without its ca\.pem"):
        certificates.make(tmp_path)
    assert (tmp_path / "ca.key").read_text() == "precious"


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'envbus\[provision\]'"):
        certificates.make(tmp_path)
