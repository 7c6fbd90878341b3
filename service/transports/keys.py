"""How a caller shows the API key. Comparison takes the same time whatever the key, so that timing tells nothing about it."""

from __future__ import annotations

import hmac

from aiohttp import web

SUBPROTOCOL_PREFIX = "bearer."


def is_key(given: str, expected: str) -> bool:
    """Compare two keys in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def request_key(request: web.Request) -> str:
    """Return the key of `Authorization: Bearer KEY` or of the subprotocol `bearer.KEY` (a page cannot set headers), or nothing."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
        if protocol.strip().startswith(SUBPROTOCOL_PREFIX):
            return protocol.strip().removeprefix(SUBPROTOCOL_PREFIX)
    return ""
