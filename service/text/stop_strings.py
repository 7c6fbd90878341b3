"""Find stop strings in text that arrives in pieces.

Knows characters, not tokens. One automaton per request over all its stop strings (Aho and Corasick 1975): each character is one
step, whatever the number of strings.
Invariant: cutting the same text into other pieces gives the same result, and at most `longest stop - 1` characters are held back.

The match that counts is the leftmost; of two that start together, the shorter. While a longer string that started further left
may still complete, the decision waits for the next character.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from service.errors import InvalidRequest


@dataclass(slots=True)
class _Node:
    """A prefix of at least one stop string. `depth`: its length. `found`: the longest stop string that ends here, if any."""

    depth: int
    children: dict[str, _Node]
    fallback: _Node | None = None
    found: str | None = None


class StopStrings:
    """The compiled stop strings of one request; immutable, shared by its sequences."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Compile `stops`; raises InvalidRequest if one is empty (it would match everywhere)."""
        for position, stop in enumerate(stops):
            if not stop:
                raise InvalidRequest("a stop string must not be empty", param=f"stop[{position}]")
        self.root = _Node(depth=0, children={})
        for stop in stops:
            node = self.root
            for character in stop:
                node = node.children.setdefault(character, _Node(depth=node.depth + 1, children={}))
            node.found = stop
        self._link()

    def _link(self) -> None:
        """Give each node its fallback, breadth first, so that shorter prefixes are done before longer ones."""
        waiting = deque(self.root.children.values())
        for child in waiting:
            child.fallback = self.root
        while waiting:
            node = waiting.popleft()
            for character, child in node.children.items():
                child.fallback = self.step(node.fallback or self.root, character)
                waiting.append(child)
            # The longest string ending here starts furthest left; a shorter one matters only where there is no longer.
            if node.found is None and node.fallback is not None:
                node.found = node.fallback.found

    def step(self, node: _Node, character: str) -> _Node:
        """Return the node of the longest stop prefix that ends with `character`."""
        while True:
            child = node.children.get(character)
            if child is not None:
                return child
            if node.fallback is None:
                return node
            node = node.fallback


class StopScanner:
    """The search of one sequence."""

    __slots__ = ("_best", "_end", "_held", "_node", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = stops.root
        self._held = ""  # text that may still turn out to be part of a stop string
        self._end = 0  # length of all text seen
        self._best: tuple[int, str] | None = (
            None  # (start, stop string) found, while an earlier start may still complete
        )
        self.matched: str | None = None

    def is_done(self) -> bool:
        """Tell whether a stop string was found and decided on."""
        return self.matched is not None

    def feed(self, text: str) -> str:
        """Take more text and return what is now certainly before any stop string; sets `matched` once the search has ended."""
        if self.matched is not None:
            return ""
        held = self._held + text
        held_start = self._end - len(self._held)
        node = self._node
        step = self._stops.step
        for character in text:
            node = step(node, character)
            self._end += 1
            if node.found is not None:
                start = self._end - len(node.found)
                if self._best is None or start < self._best[0]:
                    self._best = (start, node.found)
            if self._best is not None and self._end - node.depth >= self._best[0]:
                return self._conclude(held, held_start)
        self._node = node
        certain = len(held) - node.depth
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """Return the text held back: the sequence has ended, so no longer string can complete."""
        if self.matched is not None:
            return ""
        held, self._held = self._held, ""
        if self._best is None:
            return held
        return self._conclude(held, self._end - len(held))

    def _conclude(self, held: str, held_start: int) -> str:
        assert self._best is not None
        start, self.matched = self._best
        self._held = ""
        return held[: start - held_start]
