"""Every error the allocator raises.

An `AllocatorError` promises that the call which raised it has changed nothing, so a caller may
catch it, free something and try again.

    AllocatorError
    ├── OutOfBlocks        not enough free blocks; ordinary, the scheduler preempts or waits
    │   └── QuotaExceeded  blocks are free, and this namespace may not have them
    ├── StaleBlock         the block is not what the caller thinks it is (free, reused, outside the pool)
    ├── RefCountError      more references given back than are held (double free)
    ├── PublishConflict    a published block was to be published under another hash
    ├── TableNotEmpty      a table that holds tokens was asked to adopt a cached prefix
    ├── OutOfSlots         no free run of slots is long enough (`contiguous.py` only)
    ├── StaleSpan          a span was released that is not held (`contiguous.py` only)
    ├── WeakHash           the injected block hash cannot keep different prefixes apart
    ├── OutOfRange         an argument is outside its limits (also a ValueError)
    ├── EventsLost         events were asked for that have left the replay buffer; start again from a snapshot
    ├── UnknownPolicy      no eviction policy has this name (also a ValueError)
    └── InvariantBroken    `BlockPool.check` found the bookkeeping wrong: a bug in this package or its caller
"""

from collections.abc import Iterable


class AllocatorError(Exception):
    """Base of all errors of this package; the raising call has changed nothing."""


class OutOfBlocks(AllocatorError):
    """Fewer blocks are free than the call would use up."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} free blocks are needed and {free} are left; release some and try again")
        self.needed = needed
        self.free = free


class QuotaExceeded(OutOfBlocks):
    """Blocks are free, but the namespace's cap, or what others are guaranteed, keeps them from it."""

    def __init__(self, needed: int, available: int, namespace: bytes) -> None:
        super().__init__(needed, available)
        self.namespace = namespace
        name = namespace.hex()[:12] or "(default)"
        message = f"{needed} blocks are needed and namespace {name} may have {available} more; "
        self.args = (message + "its cap, or the floors guaranteed to others, stand against it",)


class StaleBlock(AllocatorError):
    """A block id does not name what the caller believes it names."""

    def __init__(self, block_id: int, reason: str) -> None:
        super().__init__(f"block {block_id} {reason}")
        self.block_id = block_id


class RefCountError(AllocatorError):
    """More references to a block were given back than are held."""

    def __init__(self, block_id: int, held: int, released: int, explanation: str = "") -> None:
        message = f"block {block_id} has {held} references to give back and {released} were released"
        super().__init__(f"{message}: {explanation}" if explanation else message)
        self.block_id = block_id
        self.held = held
        self.released = released


class PublishConflict(AllocatorError):
    """A block that is already findable under one hash was published under another."""

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} is already published under another hash; published blocks never change")
        self.block_id = block_id


class TableNotEmpty(AllocatorError):
    """Only an empty table can adopt a cached prefix."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a cached prefix can only be adopted by an empty table and this one has {num_tokens} tokens")
        self.num_tokens = num_tokens


class OutOfSlots(AllocatorError):
    """No hole of a contiguous arena is long enough, though there may be enough slots in all."""

    def __init__(self, needed: int, largest: int, free: int) -> None:
        super().__init__(f"{needed} slots in one piece are needed; the longest hole has {largest}, all together {free}")
        self.needed = needed
        self.largest = largest
        self.free = free


class StaleSpan(AllocatorError):
    """A span of a contiguous arena was given back that is not held (any more)."""

    def __init__(self, start: int, num_slots: int) -> None:
        super().__init__(f"no span of {num_slots} slots at {start} is held")
        self.start = start
        self.num_slots = num_slots


class WeakHash(AllocatorError):
    """The block hash given to a `PrefixCache` maps different inputs to one digest, or is too short."""


class OutOfRange(AllocatorError, ValueError):
    """An argument is outside its limits; `high` is None where there is no upper limit."""

    def __init__(self, field: str, value: float, low: float, high: float | None = None) -> None:
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        super().__init__(f"{field} must be {limits} and is {value}")
        self.field = field
        self.value = value


class EventsLost(AllocatorError):
    """The replay buffer no longer reaches back so far; take a snapshot and read on from it."""

    def __init__(self, seq: int, first: int) -> None:
        super().__init__(f"event {seq} was asked for and the buffer begins with {first}; start again from a snapshot")
        self.seq = seq
        self.first = first


class UnknownPolicy(AllocatorError, ValueError):
    """No eviction policy has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"policy must be one of {', '.join(known)} and is {name!r}")


class InvariantBroken(AllocatorError):
    """The pool's bookkeeping contradicts itself; the message says where."""
