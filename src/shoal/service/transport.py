"""Certificates of a service that others reach over the network. One on the loopback needs none."""

import os
import socket
from hashlib import sha256

from shoal.cluster.certificates import as_der, make_authority, make_request, sign_request
from shoal.cluster.files import read_private, write_private
from shoal.cluster.reach import choose_address

KEY, CERTIFICATE, ADDRESS = "node.key", "node.pem", "node.address"


def certificate_for(folder: str, host: str) -> str:
    """The certificate of this service, as PEM; made when there is none, or none for this address."""
    address = choose_address(None if host in ("0.0.0.0", "::") else socket.gethostbyname(host))
    known = os.path.exists(os.path.join(folder, CERTIFICATE))
    if not known or read_private(folder, ADDRESS).decode() != address:
        ca, ca_key = make_authority()
        key, request = make_request(socket.gethostname())
        write_private(folder, KEY, key)
        write_private(folder, CERTIFICATE, sign_request(request, address, ca, ca_key))
        write_private(folder, ADDRESS, address)
    return read_private(folder, CERTIFICATE).decode()


def files_for(folder: str) -> tuple[str, str]:
    """The paths of the key and of the certificate."""
    return os.path.join(folder, KEY), os.path.join(folder, CERTIFICATE)


def fingerprint(certificate: str) -> str:
    """What people can compare: the digest of a certificate."""
    return sha256(as_der(certificate.encode())).hexdigest()
