"""The speculation benchmark counts what it says, over an engine whose tokens are made up."""

from types import SimpleNamespace
from typing import Any

from speculation import run

from service.config import SchedulerConfig
from service.messages import SamplingParams
from tests.factories import make_core
from tests.fakes import FakeRunner


def test_both_ways_give_the_same_answers_and_only_one_of_them_drafts() -> None:
    core = make_core(num_blocks=101)
    parts: Any = SimpleNamespace(core=core, runner=FakeRunner(101, 4, choose=lambda context, seed: context[-3]))
    sampling = SamplingParams(temperature=0.0, max_tokens=31)
    prompts = [(7, 8, 9, 7, 8, 9), (20, 21, 22, 20, 21, 22, 20)]
    off, on = (run(parts, SchedulerConfig(speculation=kind), prompts, sampling) for kind in ("off", "ngram"))
    assert off.answers == on.answers
    assert [len(answer) for answer in on.answers] == [31, 31]
    assert off.num_decoded == on.num_decoded == 60
    assert (off.drafted, off.accepted) == (0, 0)
    assert on.accepted == on.drafted > 40
    assert off.rate > 0
