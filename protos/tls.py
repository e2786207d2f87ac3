"""Certificates, for clients at the door and between a cluster's members: read once, refused with the file's name.
Besides them the token that the members of a run show each other."""

from __future__ import annotations

import re
import secrets
import ssl
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from protos.errors import Misconfigured
from protos.hints import unusable
from protos.listening import ANY_IPV4, hold_ipv6, netloc
from protos.setting import setting

WORKER_NAME = "baton-worker"
"""The name in every worker's certificate (a DNS name of its subjectAltName). Workers come and go at changing addresses,
so the name is one for all, and an address is not looked at."""

TOKEN_KEY = "authorization"
MIN_TOKEN_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")

_REFUSALS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS: start it with [peers] too, or leave [peers] out here",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the authority in peers.ca: both sides need the same one",
    "Hostname Verification": f"its certificate is not for the name {WORKER_NAME}: issue it for that (subjectAltName)",
    "failed to connect to all addresses.*Socket closed": (
        "it closed the connection: with [peers] it takes only callers with a certificate of its peers.ca, so give ca, "
        "cert and key here, of the same authority"
    ),
}


def why_refused(error: str) -> str:
    """Whose certificates are wrong and why, if gRPC reports it; else ""."""
    return next((why for sign, why in _REFUSALS.items() if re.search(sign, error)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """How gateways and workers authenticate each other.

    Every call to a worker shows the `token`; a supervisor makes one for its run where none is given. `ca`, `cert` and
    `key` are files (PEM): each member shows `cert`, and accepts what `ca` has signed. All three or none: without them
    calls are not encrypted, and a reader of the network learns the token, too.
    """

    ca: str = setting("", "Authority that signed the certificates of gateways and workers (PEM file).")
    cert: str = setting("", "Certificate of this member (PEM file).")
    key: str = setting("", "Private key of this member (PEM file).")
    token: str = setting(
        "",
        "Token that callers of a worker show; prefer the variable: other users can see flags.",
        variable="BATON_TOKEN",
        repr=False,
    )

    def __post_init__(self) -> None:
        paths = {name: getattr(self, name) for name in ("ca", "cert", "key")}
        missing = [name for name, path in paths.items() if not path]
        if missing and len(missing) < len(paths):
            raise Misconfigured(
                f"peers: give ca, cert and key, or none of them: {missing[0]} is missing", param=f"peers.{missing[0]}"
            )
        if self.token and (len(self.token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(self.token)):
            raise Misconfigured(
                f"peers.token has {len(self.token)} characters: give {MIN_TOKEN_CHARACTERS} or more, as `openssl "
                "rand -hex 32` makes",
                param="peers.token",
            )

    def with_token(self) -> PeerTls:
        return self if self.token else replace(self, token=secrets.token_urlsafe(32))

    def check(self) -> None:
        """Raises Misconfigured for files that cannot be read, or are no certificates and no key."""
        if not self.ca:
            return
        _check_pair("peers", self.cert, self.key)
        _read("peers.ca", self.ca)
        try:
            ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            raise Misconfigured(f"peers.ca: {self.ca} has no certificate (PEM): {error}", param="peers.ca") from error

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a worker's server, which requires its callers' certificates. Raises Misconfigured."""
        if not self.ca:
            return None
        return grpc.ssl_server_credentials(
            [(_read("peers.key", self.key), _read("peers.cert", self.cert))],
            root_certificates=_read("peers.ca", self.ca),
            require_client_auth=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a gateway's calls. Raises Misconfigured."""
        if not self.ca:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read("peers.ca", self.ca),
            private_key=_read("peers.key", self.key),
            certificate_chain=_read("peers.cert", self.cert),
        )


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    return ((TOKEN_KEY, f"Bearer {token}"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceTls:
    """Files (PEM) that the gateway shows its clients, over HTTP and gRPC. Both or none."""

    cert: str = setting("", "Certificate that clients see, over HTTP and gRPC (PEM file).")
    key: str = setting("", "Its private key (PEM file).")

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            missing = "key" if self.cert else "cert"
            raise Misconfigured(f"tls: {missing} is missing: give cert and key, or neither", param=f"tls.{missing}")

    def check(self) -> None:
        """Raises Misconfigured for files that cannot be read, or are not a certificate and its key."""
        if self.cert:
            _check_pair("tls", self.cert, self.key)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Raises Misconfigured."""
        if not self.cert:
            return None
        return grpc.ssl_server_credentials([(_read("tls.key", self.key), _read("tls.cert", self.cert))])


def expiry_s(cert: str) -> float:
    """When the first certificate of the file (PEM) ends, in seconds since 1970. Raises Misconfigured."""
    from cryptography import x509  # only where certificates are used: it takes 50 ms to import

    try:
        return x509.load_pem_x509_certificate(_read("cert", cert)).not_valid_after_utc.timestamp()
    except ValueError as error:
        raise Misconfigured(f"{cert} has no certificate (PEM): {error}", param="cert") from error


def listen_grpc(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Opens a port, unencrypted without credentials, and returns it. Raises RuntimeError when it is taken."""
    with ExitStack() as held:
        if host == ANY_IPV4:
            port = hold_ipv6(port, held) or port
        address = netloc(host.strip("[]"), port)
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)


def _check_pair(table: str, cert: str, key: str) -> None:
    _read(f"{table}.cert", cert)
    _read(f"{table}.key", key)
    try:
        # Without a password OpenSSL would prompt for that of an encrypted key on the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise Misconfigured(
            f"{table}: {cert} and {key} are not a certificate and its key (PEM, without a password): {error}",
            param=table,
        ) from error


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Misconfigured(f"{setting}: {path}: {unusable(error)}", param=setting) from error
