"""What can go wrong in this package. Bad shapes inside a step are programming errors and are asserted, not typed."""

from __future__ import annotations

from collections.abc import Sequence


class BackendsError(Exception):
    """Base of every error of this package."""


class BackendError(BackendsError):
    """A named backend cannot run here, or no backend of that name exists. `reasons` is never empty."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        """Keep the name and the reasons for a caller that shows them in its own way."""
        self.name = name
        self.reasons = tuple(reasons)
        super().__init__(f"backend {name!r} cannot run here: {'; '.join(self.reasons)}")


class BlockCopyError(BackendsError):
    """A block copy names a block outside the pool, or writes one destination twice; nothing was copied."""
