"""How a rendezvous server and its clients prove to each other that they have the same key, without sending it.

    server ── nonce ──────────────────────────▶ client       HMAC-SHA256, of the side and both nonces
    server ◀── own nonce, HMAC("client" ...) ── client
    server ── HMAC("board" ...) ──────────────▶ client       a stranger who took the port is noticed, too

What follows is neither signed nor encrypted: the key keeps out strangers who can connect, but not
an attacker who can alter packets.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
MAC_BYTES = 32
CLAIM_BYTES = NONCE_BYTES + MAC_BYTES


class WrongKey(PermissionError):
    """The two sides have different keys."""


def new_key() -> bytes:
    return secrets.token_hex(32).encode()


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def claim(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return client_nonce + _mac(key, b"client", server_nonce, client_nonce)


def accept(key: bytes, server_nonce: bytes, claimed: bytes) -> bytes:
    """The server's answer to a client's claim. Raises WrongKey."""
    client_nonce, mac = claimed[:NONCE_BYTES], claimed[NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, b"client", server_nonce, client_nonce)):
        raise WrongKey("the client does not have the rendezvous server's key")
    return _mac(key, b"board", server_nonce, client_nonce)


def check(key: bytes, server_nonce: bytes, client_nonce: bytes, answer: bytes) -> None:
    """The client's look at the server's answer. Raises WrongKey."""
    if not hmac.compare_digest(answer, _mac(key, b"board", server_nonce, client_nonce)):
        raise WrongKey("the rendezvous server does not have the key")


def _mac(key: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key, side + server_nonce + client_nonce, "sha256")
