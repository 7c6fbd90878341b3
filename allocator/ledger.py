"""The ledger: in whose name each reference to a block is held.

The pool counts references per block; the ledger lists them per owner. The two are written by every call and
compared by `audit.py`, so a reference that was lost, or given back twice, shows as a difference with a name.

Invariant: an account lists exactly the references its owner holds, and a call that would overdraw it is refused.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from allocator.errors import RefCountError
from allocator.quota import Space

OwnerKind = Literal["sequence", "lease", "tier", "other"]


class Owner(NamedTuple):
    """Who holds references: what it is, which one, and the namespace that is charged for them."""

    kind: OwnerKind
    name: str
    namespace: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


NOBODY = Owner("other", "without a name")  # calls that give no account are booked here


class Account:
    """The references of one owner. Opened by `BlockPool.open`; lists itself in the ledger while it holds something."""

    __slots__ = ("_ledger", "acted_at", "action", "entries", "owner", "since", "space")

    def __init__(self, ledger: "Ledger", owner: Owner, space: Space | None) -> None:
        self._ledger = ledger
        self.owner = owner
        self.space = space  # what the namespace is charged, None in a pool without quotas
        self.entries: dict[int, int] = {}  # block → references
        self.since = ledger.now  # when it began to hold something
        self.action = "open"  # the last call that changed it
        self.acted_at = ledger.now

    def __str__(self) -> str:
        since = f"since {self.since:.3f}" if self.entries else "which holds nothing now"
        return f"{self.owner}, {since}, last call {self.action!r} at {self.acted_at:.3f}"

    def gained(self, blocks: Sequence[int], action: str) -> None:
        """Book one more reference to each block."""
        entries, ledger = self.entries, self._ledger
        if not blocks:
            return
        if not entries:
            ledger.accounts[id(self)] = self
            self.since = ledger.now
        if action == "take":  # nobody held these, so neither did this account
            entries.update(dict.fromkeys(blocks, 1))
        else:
            for block in blocks:
                entries[block] = entries.get(block, 0) + 1
        last = ledger.last
        for block in blocks:
            last[block] = self
        self.action, self.acted_at = action, ledger.now

    def lost(self, blocks: Iterable[int], action: str) -> None:
        """Book one reference less for each block; the caller has checked that they are there."""
        entries = self.entries
        for block in blocks:
            if entries[block] == 1:
                del entries[block]
            else:
                entries[block] -= 1
        self.action, self.acted_at = action, self._ledger.now
        if not entries:
            self._ledger.accounts.pop(id(self), None)

    def require(self, blocks: Sequence[int]) -> None:
        """Raise `RefCountError` unless the owner holds a reference for every entry of `blocks`."""
        entries, distinct = self.entries, set(blocks)
        if len(distinct) == len(blocks) and entries.keys() >= distinct:
            return
        for block, released in Counter(blocks).items():
            held = entries.get(block, 0)
            if released > held:
                raise RefCountError(block, held, released, f"the account is {self}; {self._ledger.explain(block)}")


class Ledger:
    """All accounts of one pool. `now` is the caller's clock, in seconds, and only serves explanations."""

    __slots__ = ("accounts", "anonymous", "copiers", "last", "now")

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.accounts: dict[int, Account] = {}  # id → account, those that hold something
        self.last: list[Account | None] = [None] * num_blocks  # who last gained a reference to each block
        self.copiers: dict[int, Account] = {}  # target of a copy in flight → who began it
        self.anonymous = Account(self, NOBODY, None)

    def holders(self, block: int) -> Iterator[Account]:
        """Find the accounts that hold a block; O(accounts)."""
        return (account for account in self.accounts.values() if block in account.entries)

    def overdue(self, kind: OwnerKind, before: float) -> list[Account]:
        """List the accounts of one kind that have held something since before a time: leases nobody gave back."""
        return [a for a in self.accounts.values() if a.owner.kind == kind and a.since < before]

    def totals(self, num_blocks: int) -> list[int]:
        """Add up the references to each block over all accounts; O(references)."""
        totals = [0] * num_blocks
        for account in self.accounts.values():
            for block, count in account.entries.items():
                totals[block] += count
        return totals

    def explain(self, block: int) -> str:
        """Say who holds a block, since when, and what each did last; or who was the last to hold it."""
        holders = [str(account) for account in self.holders(block)]
        if block in self.copiers:
            holders.append(f"a copy into it, begun by {self.copiers[block].owner}")
        if holders:
            return f"block {block} is held by " + " and by ".join(holders)
        account = self.last[block]
        if account is None:
            return f"block {block} was never held"
        return f"block {block} is held by no account; the last one was {account}"
