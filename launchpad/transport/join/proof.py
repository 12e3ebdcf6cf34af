"""The certificate of a job's head, and the proof that a peer knows the job's secret."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl

# The certificate only has to outlive the job; peers don't look at its dates.
_CERTIFICATE_DAYS = 3650


def nonce() -> str:
    """A value that no other connection has."""
    return os.urandom(16).hex()


def proof(secret: bytes, role: str, nonces: tuple[str, str], certificate: bytes) -> str:
    """What only a peer that knows the secret can say, on this connection only, and only in this role.

    HMAC-SHA256 over the nonces of node and head and the hash of the head's certificate (DER): whoever is in the middle
    has another certificate.
    """
    text = " ".join((role, *nonces, hashlib.sha256(certificate).hexdigest()))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def node_context() -> ssl.SSLContext:
    """TLS for a node: any certificate will do, as the proofs are bound to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def head_context() -> tuple[ssl.SSLContext, bytes]:
    """TLS for the head, with a new certificate, and that certificate (DER)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "launchpad")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_CERTIFICATE_DAYS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Tickets resume a session, which we never do, and would be sent after the handshake.
    context.num_tickets = 0
    fd = os.memfd_create("launchpad-certificate", os.MFD_CLOEXEC)  # ssl reads files only; this one is in no folder
    try:
        os.write(fd, made.public_bytes(serialization.Encoding.PEM) + private)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context, made.public_bytes(serialization.Encoding.DER)
