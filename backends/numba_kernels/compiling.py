"""Compiles functions of addresses and keeps the machine code on disk. Knows neither what they compute nor on which thread."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import cfunc, types

BODY = types.void(types.int64)


@lru_cache(maxsize=1)
def source_key() -> int:
    """Return a number that changes with any source file of the kernels.

    Numba's disk cache looks at the time stamp of one file only, and wheels may carry constant time stamps; a body that captures this
    number is compiled anew when any of the files that it calls has changed.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:6], "big")


def compile_body(body: Any, signature: Any = BODY) -> Any:
    """Compile a body, of one int64 unless told otherwise, or load it from Numba's cache (`NUMBA_CACHE_DIR`, or beside the source)."""
    return cfunc(signature, cache=True, nogil=True)(body)
