"""The one rule for lone surrogates: each becomes U+FFFD, wherever text enters.

A JSON escape such as `"\\ud83d"` parses to a `str` that no UTF-8 encoder accepts; tokenizers, hashes and sockets would raise.
Two halves that belong together (`"\\ud83d"` next to `"\\ude42"`) are joined to the character they mean.
"""

from __future__ import annotations

import re

_HALVES = re.compile("[\ud800-\udfff]")


def replace_lone_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined and each lone surrogate replaced by U+FFFD; always encodable as UTF-8."""
    if text.isascii() or _HALVES.search(text) is None:
        return text
    # Through UTF-16 a high half followed by a low half becomes one code point; what stays alone is replaced.
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALVES.sub("\ufffd", joined)
