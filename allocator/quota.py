"""Page rights: how many blocks a namespace may have, and whose cache is evicted when blocks run out.

Three numbers per namespace, applied when blocks are taken and when cached ones are evicted:

    cap     blocks it has at most, held and cached together; at its cap it recycles its own cache
    floor   blocks it can always get: others leave that many free, and never evict its cache below it
    weight  its share of the cache: the namespace furthest above its share loses a block first

Invariant: `num_free >= Σ max(0, floor - held)`, so every floor can be filled at any time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from allocator.errors import OutOfRange

PUBLIC = b"\0public segments\0"  # the namespace that is charged for the blocks of declared public segments


@dataclass(frozen=True, slots=True)
class Quota:
    """The rights of one namespace, in blocks; `cap` None means the whole pool."""

    cap: int | None = None
    floor: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < 1:
            raise OutOfRange("cap", self.cap, 1)
        if self.floor < 0 or (self.cap is not None and self.floor > self.cap):
            raise OutOfRange("floor", self.floor, 0, self.cap)
        if not self.weight > 0:
            raise OutOfRange("weight", self.weight, 0)


class Space:
    """What one namespace has at the moment; `resident` counts held and cached blocks, `held` the held ones."""

    __slots__ = ("__weakref__", "held", "namespace", "quota", "resident")

    def __init__(self, namespace: bytes, quota: Quota) -> None:
        self.namespace = namespace
        self.quota = quota
        self.held = 0
        self.resident = 0

    @property
    def unmet_floor(self) -> int:
        """Count the blocks that others must leave free for it."""
        return max(0, self.quota.floor - self.held)

    @property
    def is_protected(self) -> bool:
        """Say whether others must not evict its cache: it has no more than its floor."""
        return self.resident <= self.quota.floor

    def excess(self, num_blocks: int) -> float:
        """Rank it for eviction: its blocks, with `num_blocks` more, in units of its share."""
        return (self.resident + num_blocks) / self.quota.weight


class Quotas:
    """The rights of every namespace of one pool: the named ones, and `default` for all others."""

    __slots__ = ("_default", "_named", "_spaces", "_unmet")

    def __init__(self, named: Mapping[bytes, Quota] | None = None, default: Quota | None = None) -> None:
        """A floor needs a name: unknown namespaces cannot all be guaranteed something."""
        self._default = Quota() if default is None else default
        if self._default.floor:
            raise OutOfRange("default.floor", self._default.floor, 0, 0)
        self._named = {namespace: Space(namespace, quota) for namespace, quota in (named or {}).items()}
        self._spaces: WeakValueDictionary[bytes, Space] = WeakValueDictionary(self._named)
        self._unmet = sum(space.unmet_floor for space in self._named.values())

    @property
    def unmet(self) -> int:
        """Count the free blocks that are reserved for somebody."""
        return self._unmet

    @property
    def sum_of_floors(self) -> int:
        """Count the blocks guaranteed to somebody."""
        return sum(space.quota.floor for space in self._named.values())

    def space(self, namespace: bytes) -> Space:
        """Return the one `Space` of a namespace; it lives as long as somebody refers to it, or has a name."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = Space(namespace, self._default)
        return space

    def spaces(self) -> list[Space]:
        """List the namespaces that are named or have blocks."""
        return list(self._spaces.values())

    def available(self, space: Space, num_free: int) -> int:
        """Count the free blocks that `space` may take: the floors of others and its own cap are respected."""
        available = num_free - (self._unmet - space.unmet_floor)
        if space.quota.cap is not None:
            available = min(available, space.quota.cap - space.held)
        return max(0, available)

    def largest(self, space: Space, num_usable: int) -> int:
        """Count the blocks that `space` can ever hold at once, when nobody else holds any."""
        largest = num_usable - (self.sum_of_floors - space.quota.floor)
        return largest if space.quota.cap is None else min(largest, space.quota.cap)

    def holds(self, space: Space, change: int) -> None:
        """Book that `space` holds `change` blocks more."""
        self._unmet -= space.unmet_floor
        space.held += change
        self._unmet += space.unmet_floor

    def recount(self, resident: Counter[bytes], held: Counter[bytes]) -> None:
        """Start again from counted charges."""
        for space in self.spaces():
            space.resident, space.held = resident[space.namespace], held[space.namespace]
        self._unmet = sum(space.unmet_floor for space in self.spaces())
