"""A CA for tests, and what it signs."""

import datetime
import ipaddress
import os
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kvplane.client.tls import Pem, TlsFiles

HOUR = datetime.timedelta(hours=1)
HOSTS = ("localhost", "127.0.0.1")


class Authority:
    """trustme's CA; its own certificates cannot have URIs."""

    def __init__(self) -> None:
        made = trustme.CA()
        self.pem = made.cert_pem.bytes()
        self._name = x509.load_pem_x509_certificate(self.pem).subject
        self._key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)

    def issue(
        self,
        *uris: str,
        hosts: tuple[str, ...] = HOSTS,
        lasts: datetime.timedelta = HOUR,
        believes: bytes = b"",
    ) -> Pem:
        """Sign a certificate. `lasts` may be negative: it has ended already."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 24 * HOUR)
            .not_valid_after(now + lasts)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        signed = certificate.public_bytes(serialization.Encoding.PEM)
        return Pem(believes or self.pem, signed, secret)


def write(folder: Path, pem: Pem, server_name: str = "") -> TlsFiles:
    """Put the files into the folder, each whole at once, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"ca.pem": pem.ca, "cert.pem": pem.cert, "key.pem": pem.key}
    for name, content in names.items():
        fresh = folder / f"{name}.new"
        fresh.write_bytes(content)
        os.replace(fresh, folder / name)
    ca, cert, key = (str(folder / name) for name in names)
    return TlsFiles(ca, cert, key, server_name)
