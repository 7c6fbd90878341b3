"""Decides which decodes carry drafts and how many. Knows tokens, counts and how long steps took; never tensors, blocks or text.

A step computes many tokens for little more than the price of one until the processor, and no longer the memory, is what it waits for. So a
draft is worth computing while it is likelier to be confirmed than what it adds to the time of the step, measured in tokens:

    r(k) · r(k+1) · … · r(k+j-1) ≥ MARGIN · b · S / (a + b · S)      a + b · S: the time of a step of S tokens, fitted to the steps seen
                                                                     S: tokens that the step brings without drafts

for the j-th draft of a sequence whose last k tokens match; r(k): the share of drafts behind so long a match that were right, of those judged.
Alone, nearly any guess is worth it (b is small beside a); in a large batch only a sure one. One rule thus switches speculation off by
acceptance and by batch size. A match with the answer itself says far more than one with the prompt, so the two have rates of their own.

Drafts continue known tokens, so a step with drafts cannot be made while the one before it is computed. Where they bring less than that
would save, steps are made ahead, and now and then one is not, to see whether the text has begun to repeat itself.

Invariant: what is proposed never changes an answer, only how many steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from service.config import SchedulerConfig
from service.engine.ngram import NgramIndex, continued

MAX_MATCH = 8  # tokens; longer matches count as so long
SHARED_WINDOW = 64  # drafts that count in the rates of all sequences: the memory of a running average
OWN_WINDOW = 32  # drafts that count in a sequence's own rates
OWN_WEIGHT = 4.0  # drafts; see `Drafter`
FIRST_DOUBTS = (0.8, 0.6)  # of a match of one token with the prompt, with the answer; about what prose shows
# Tokens without drafts until an n-gram is tried again, with one, although its rate says that it is not worth it: at least so many, and as many
# as make these tries cost so small a part of the time. One that was right is followed by another at once.
RETRY_AFTER = 32
RETRY_SHARE = 0.01
STEPS_AHEAD = 32  # made in a row until one waits for the tokens before it, to try
WAITING_PAYS = (
    0.05  # tokens that drafts bring a sequence and step: about what making the step ahead would save of its time
)
FIRST_GAIN = 0.5
GAIN_WINDOW = 16  # steps

FITTED_TOKENS = 128  # larger steps say little of the price of one more token in a small one
FIT_MEMORY = 0.97  # weight of the past per step
# Until steps of different sizes have been seen, one token more is taken to cost this part of a step of one.
ASSUMED_SLOPE = 1 / 16
ASSUMED_WEIGHT = 1.0  # tokens² of variance at which the fit counts as much as the assumption
# What a draft must bring for what it costs. One that brings no more only makes the sequences beside it wait, and the line is too flat for large
# steps where small ones are among those it was fitted to.
MARGIN = 1.25
LEAST_PRICE = 0.02  # whatever the fit says: a draft that is right once in fifty times is not worth its bookkeeping
OUTLIER = 3.0  # a step longer than so many times the expected time is taken for that long


class StepTime:
    """The time of a step as a function of its tokens, a line fitted to recent steps."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # weighted means
        self._seconds = 0.0
        self._variance = 0.0  # weighted sums of squares and products about the means
        self._covariance = 0.0

    @property
    def slope(self) -> float:
        """Seconds that one token more takes; at least 0."""
        assumed = self._seconds * ASSUMED_SLOPE / (1.0 + ASSUMED_SLOPE * (self._tokens - 1.0))
        prior = ASSUMED_WEIGHT
        fitted = (self._covariance / max(self._weight, 1e-9) + assumed * prior) / (
            self._variance / max(self._weight, 1e-9) + prior
        )
        return max(0.0, fitted)

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds that a step of `num_tokens` takes; 0 while nothing is known."""
        return max(self._seconds + self.slope * (num_tokens - self._tokens), self.slope * num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a step."""
        if self._weight:
            seconds = min(seconds, OUTLIER * self.expected_s(num_tokens))
        # Welford's update with a decaying weight.
        kept = self._weight * FIT_MEMORY
        self._weight = kept + 1.0
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += off_tokens / self._weight
        self._seconds += off_seconds / self._weight
        share = kept / self._weight
        self._variance = self._variance * FIT_MEMORY + off_tokens * off_tokens * share
        self._covariance = self._covariance * FIT_MEMORY + off_tokens * off_seconds * share


class Rates:
    """How often a draft was right, as running averages over all sequences, by its *kind*: what it continues, see `kind_of`."""

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        """Begin hopefully, the more so the longer the match and where it lies in the answer."""
        lengths = range(MAX_MATCH + 1)
        self._rates = [1.0 - doubt**length for doubt in FIRST_DOUBTS for length in lengths]

    def of(self, kind: int) -> float:
        """Return the rate of a kind."""
        return self._rates[kind]

    def learn(self, kind: int, is_right: bool) -> None:
        """Take in the fate of a draft."""
        self._rates[kind] += (is_right - self._rates[kind]) / SHARED_WINDOW


def kind_of(length: int, is_in_answer: bool) -> int:
    """Number what a draft continues: a match of `length` tokens or of MAX_MATCH and more, with the prompt or with the answer itself."""
    return min(length, MAX_MATCH) + is_in_answer * (MAX_MATCH + 1)


class Drafter:
    """What is known of one sequence: its n-grams, and how far they can be trusted.

    A rate is that of all sequences until this one has shown its own: OWN_WEIGHT drafts of its own weigh as much as those of all.
    """

    __slots__ = (
        "_index",
        "_is_in_answer",
        "_judged",
        "_length",
        "_num_prompt_tokens",
        "_right",
        "_shared",
        "_tried_at",
        "gain",
    )

    def __init__(self, index: NgramIndex, num_prompt_tokens: int, shared: Rates, gain: float) -> None:
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._shared = shared
        self._judged = [0.0] * (2 * (MAX_MATCH + 1))  # drafts of each kind, fading
        self._right = self._judged.copy()  # those of them that were right
        self.gain = gain  # confirmed drafts a step, a running average
        self._length, self._is_in_answer = 0, False  # of the match behind the drafts under way
        self._tried_at: float = 0  # tokens there were when drafts were last proposed; -inf once all of them were right

    def propose(self, tokens: list[int], most: int, price: float) -> tuple[int, ...]:
        """Guess at most `most` next tokens, each at least as likely to be right as `price` says."""
        self.gain -= self.gain / GAIN_WINDOW
        self._index.read(tokens)
        place = self._index.find(tokens, MAX_MATCH)
        if place is None:
            return ()
        position, self._length = place
        self._is_in_answer = position > self._num_prompt_tokens
        count = self._worth(price, most)
        if not count and len(tokens) - self._tried_at >= max(RETRY_AFTER, price / RETRY_SHARE):
            count = 1
        if not count:
            return ()
        self._tried_at = len(tokens)
        return continued(tokens, position, count)

    def _worth(self, price: float, most: int) -> int:
        """Return how many drafts are each, with all before it, at least as likely to be right as `price` says."""
        likelihood = 1.0
        for count in range(most):
            kind = kind_of(self._length + count, self._is_in_answer)
            known = OWN_WEIGHT * self._shared.of(kind) + self._right[kind]
            likelihood *= known / (OWN_WEIGHT + self._judged[kind])
            if likelihood < price:
                return count
        return most

    def learn(self, num_drafts: int, num_confirmed: int) -> None:
        """Take in the fate of the drafts proposed last: those behind the first wrong one were never judged."""
        for place in range(min(num_confirmed + 1, num_drafts)):
            kind, is_right = kind_of(self._length + place, self._is_in_answer), place < num_confirmed
            self._shared.learn(kind, is_right)
            self._judged[kind] += 1.0 - self._judged[kind] / OWN_WINDOW
            self._right[kind] += is_right - self._right[kind] / OWN_WINDOW
        if num_confirmed == num_drafts:
            self._tried_at = -inf
        self.gain += num_confirmed / GAIN_WINDOW


class Speculation:
    """Drafts for all sequences of a scheduler, and the count of them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._max_drafts = config.max_draft_tokens
        self._min_ngram = config.min_ngram
        self._max_ngram = config.max_ngram
        self._rates = Rates()
        self._step_time = StepTime()
        self._gain = FIRST_GAIN  # of all sequences, which new ones begin with
        self._num_ahead = 0  # steps made ahead since one was not

    def new_drafter(self, num_prompt_tokens: int) -> Drafter:
        """Return what a sequence that is about to decode needs."""
        index = NgramIndex(self._min_ngram, self._max_ngram)
        return Drafter(index, num_prompt_tokens, self._rates, self._gain)

    def should_wait(self, num_sequences: int, drafters: Sequence[Drafter | None]) -> bool:
        """Say whether the next step should not be made ahead, for the sake of drafts. `drafters` of the sequences that decode; None: new.

        Call it once for each step that may be made ahead.
        """
        if not drafters or self.price(num_sequences) >= 1.0:
            return False
        gain = sum(self._gain if drafter is None else drafter.gain for drafter in drafters) / len(drafters)
        self._num_ahead += 1
        if gain < WAITING_PAYS and self._num_ahead <= STEPS_AHEAD:
            return False
        self._num_ahead = 0
        return True

    def price(self, num_sequences: int) -> float:
        """Return how likely a draft must be right; 1 and more: nothing pays. It is what one adds to the time of a step, in tokens that steps of so
        many decodes bring in that time, and a margin.

        What a draft that was right saves is a later decode of its sequence. So prompts that are computed beside it make no difference: they take
        their time with drafts and without.
        """
        expected_s = self._step_time.expected_s(num_sequences)
        slope = self._step_time.slope
        if expected_s <= 0.0:
            return MARGIN * ASSUMED_SLOPE * num_sequences / (1.0 + ASSUMED_SLOPE * num_sequences)
        return max(LEAST_PRICE, MARGIN * slope * num_sequences / expected_s)

    def propose(self, drafter: Drafter, tokens: list[int], room: int, price: float) -> tuple[int, ...]:
        """Return at most `room` drafts for the sequence of `tokens`; empty where none are worth their `price`."""
        if room <= 0:
            return ()
        drafts = drafter.propose(tokens, min(room, self._max_drafts), price)
        self._gain += (drafter.gain - self._gain) / SHARED_WINDOW
        return drafts

    def learn(self, drafter: Drafter, num_drafts: int, num_accepted: int) -> None:
        """Take in how many of the drafts of a step were right."""
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        drafter.learn(num_drafts, num_accepted)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in the time of a step all of whose tokens were sampled from."""
        if num_tokens <= FITTED_TOKENS:
            self._step_time.observe(num_tokens, seconds)
