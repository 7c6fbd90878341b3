"""Typed look-ups in the key/value trees that model files carry; a wrong type or a missing key is a `ModelLoadError` that names it.

Invariant: a default stands in for an absent key only; `null` is a statement ("no window") and reads as None, as it does to Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from service.errors import ModelLoadError


class Fields:
    """A mapping read by key; `source` (say, "config.json") and the key go into every error. `defaults` stand in for absent keys."""

    def __init__(self, values: Mapping[str, object], source: str, defaults: Mapping[str, object] | None = None) -> None:
        self._values = values
        self._source = source
        self._defaults = defaults or {}

    def raw(self, key: str) -> object:
        """Return the value, the default of an absent key, or None."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def states(self, key: str) -> bool:
        """Tell whether the file itself, not a default, has a value."""
        return self._values.get(key) is not None

    def optional_int(self, key: str) -> int | None:
        """Return a whole number (a float such as 8.0 counts) or None."""
        value = self.raw(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value != int(value)
        ):
            raise self._wrong(key, "a whole number")
        return int(value)

    def optional_float(self, key: str) -> float | None:
        """Return a finite number or None."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a number")
        return float(value)

    def optional_text(self, key: str) -> str | None:
        """Return a string or None."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def optional_section(self, key: str) -> Mapping[str, object] | None:
        """Return a nested object or None."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a truth value."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def optional_size(self, key: str) -> int | None:
        """Return a whole number of at least 1, or None."""
        value = self.optional_int(key)
        if value is not None and value < 1:
            raise self._wrong(key, "at least 1")
        return value

    def required_size(self, key: str) -> int:
        """Return a whole number of at least 1; raises if the key is absent."""
        value = self.optional_size(key)
        if value is None:
            raise self._missing(key)
        return value

    def required_float(self, key: str) -> float:
        """Return a number; raises if the key is absent."""
        value = self.optional_float(key)
        if value is None:
            raise self._missing(key)
        return value

    def floats(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` positive numbers; raises if it is absent."""
        value = self.raw(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers")
        if any(isinstance(number, bool) or not isinstance(number, int | float) or not number > 0 for number in value):
            raise self._wrong(key, f"a list of {length} positive numbers")
        return tuple(float(number) for number in value)

    def token_ids(self, key: str) -> frozenset[int]:
        """Return the ids of a key that holds one id, a list of them, or nothing."""
        value = self.raw(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
            raise self._wrong(key, "a token id or a list of them")
        return frozenset(ids)

    def _missing(self, key: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {key} is missing")

    def _wrong(self, key: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {key} is {str(self.raw(key))[:80]!r}, expected {expected}")
