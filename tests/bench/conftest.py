"""Makes the benchmark programs importable: they are scripts beside each other, not a package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ops/bench"))
