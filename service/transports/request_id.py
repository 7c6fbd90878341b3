"""The caller's name for a request: cleaned, echoed and logged. It names nothing inside, so two callers may use the same one."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

MAX_REQUEST_ID_CHARACTERS = 128

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def clean_request_id(text: str | None) -> str:
    """Return `text` less what does not belong in a log or header; a fresh name if nothing is left."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/+=@-]", "", text or "")[:MAX_REQUEST_ID_CHARACTERS]
    return cleaned or uuid.uuid4().hex
