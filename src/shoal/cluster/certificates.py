"""A private authority for one cluster, and the certificates of its machines. Keys stay where they were made."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from shoal.spec.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Clocks of workstations differ: what is signed now has been valid for a while.
SLACK = timedelta(days=2)
_VALID = timedelta(days=3650)


def make_authority() -> tuple[bytes, bytes]:
    """The certificate and the key of a new authority, as PEM."""
    from cryptography import x509

    key = _new_key()
    certificate = (
        _builder("shoal cluster", "shoal cluster")
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return _sign(certificate, key), _key_pem(key)


def make_request(name: str) -> tuple[bytes, bytes]:
    """The key of a machine and its request for a certificate, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = _new_key()
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.PEM)


def sign_request(request: bytes, address: str, ca: bytes, ca_key: bytes) -> bytes:
    """A certificate for whoever made a request, good at one address only, whatever the request says; as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    try:
        asked = x509.load_pem_x509_csr(request)
        public_key = asked.public_key()
        is_sound = asked.is_signature_valid
    except ValueError:
        is_sound = False
    if not is_sound or not isinstance(public_key, EllipticCurvePublicKey):
        raise UserError("The request for a certificate is not one of ours.")
    key = serialization.load_pem_private_key(ca_key, None)
    assert isinstance(key, EllipticCurvePrivateKey)
    names = [x509.IPAddress(ip_address(address)), x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        _builder("shoal node", "shoal cluster")
        .public_key(public_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    assert x509.load_pem_x509_certificate(ca).public_key() == key.public_key()
    return _sign(certificate, key)


def as_der(certificate: bytes) -> bytes:
    """A certificate as it is sent in a handshake."""
    return ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(name: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])


def _builder(subject: str, issuer: str) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + _VALID)
    )


def _sign(certificate: "x509.CertificateBuilder", key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
