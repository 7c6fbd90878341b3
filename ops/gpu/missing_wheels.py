"""Prints the wheels of a folder whose distributions this Python lacks, one path a line.

What the machine has stays as it is: its transformers may want another tokenizers than we do.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def missing(folder: Path) -> list[Path]:
    """Return the wheels in `folder` that are not installed in any version."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_installed(wheel.name.split("-", 1)[0])]


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    print("\n".join(map(str, missing(Path(sys.argv[1])))))
