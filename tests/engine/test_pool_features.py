"""What the core uses of the allocator: owners, tenants' rights, sub-blocks and the quarantine."""

from __future__ import annotations

from random import Random

import pytest

from allocator import Owner, Quota, QuotaExceeded, Quotas, namespace_key
from service.assembly import open_pool
from service.config import CacheConfig
from service.errors import ContextTooLong
from tests.engine.driver import CoreDriver, prompt_of
from tests.fakes import continuation

SECRET = b"test"  # of the factory's prefix cache


def space(name: str) -> bytes:
    return namespace_key(SECRET, name.encode())


def test_every_reference_is_booked_under_its_sequence() -> None:
    driver = CoreDriver()
    driver.add(prompt_of(9), n=2, temperature=1.0)
    while driver.step():
        ledger = driver.core._pool.ledger
        assert ledger is not None
        names = {account.owner.name for account in ledger.accounts.values()}
        assert names == {str(sequence.id) for sequence in driver.core._scheduler.running}
    assert ledger.accounts == {}


# ── Sub-blocks ───────────────────────────────────────────────────────────────────────────────────


def test_the_next_turn_of_a_chat_finds_the_last_one_to_its_last_computed_token() -> None:
    driver = CoreDriver(sub_blocks=True, block_size=16, num_blocks=40, token_budget=64)
    history = prompt_of(21)
    for turn in range(4):
        key = driver.add(history, max_tokens=9)
        driver.run()
        assert driver.output(key) == continuation(history, 9)
        # The last token of an answer is sampled and never computed.
        assert driver.cached(key) == (0 if turn == 0 else len(history) - 7 - 1)
        history = (*history, *driver.output(key), *prompt_of(7, start=turn))


@pytest.mark.parametrize("seed", range(6))
def test_with_sub_blocks_every_answer_is_still_that_of_the_request_alone(seed: int) -> None:
    """Small pools, forks, aborts and preemptions; the fake runner reads every slot back."""
    random = Random(seed)
    driver = CoreDriver(sub_blocks=True, num_blocks=random.choice([14, 24, 40]), block_size=random.choice([4, 8]))
    beginnings = [prompt_of(12), prompt_of(5, start=2)]
    keys = []
    for _ in range(60):
        prompt = (*random.choice(beginnings)[: random.randint(1, 12)], *prompt_of(random.randint(0, 3), start=4))
        n = random.choice([1, 1, 2])
        keys.append((driver.add(prompt, random.randint(1, 9), n=n), n))
        for _ in range(random.randint(0, 4)):
            driver.step()
        if random.random() < 0.15:
            driver.core.abort(keys.pop()[0])
    driver.run()
    partial = 0
    for key, n in keys:
        for index in range(n):
            output = driver.output(key, index)
            assert output == driver.expected(key, len(output), seed=None)
        partial += driver.cached(key) % driver.core._pool.block_size > 0
    assert partial > 5
    assert driver.core.stats().pool.used == 0


def test_a_tail_that_a_step_in_flight_may_write_is_not_offered() -> None:
    driver = CoreDriver(sub_blocks=True, block_size=16)
    key = driver.add(prompt_of(5), 9)
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    driver.take(driver.core.finish_sequence(driver.sequence_ids[key][0]))  # its text has ended
    assert driver.core._pool.num_findable == 0
    driver.core.apply(driver.compute(batch))
    assert driver.core.stats().pool.used == 0


def test_a_partial_hit_is_given_up_where_its_copy_would_not_fit() -> None:
    """A lone sequence that needs the whole pool must not wait for the block that holds a partial hit."""
    driver = CoreDriver(sub_blocks=True, num_blocks=5, block_size=4)
    driver.add(prompt_of(15), max_tokens=1)
    driver.run()
    other = (*prompt_of(2), *prompt_of(13, start=3))
    key = driver.add(other, max_tokens=1)
    driver.run()
    assert driver.output(key) == continuation(other, 1)
    assert driver.cached(key) == 0


# ── Tenants ──────────────────────────────────────────────────────────────────────────────────────


def test_a_tenant_hits_its_own_cache_and_never_anothers() -> None:
    driver = CoreDriver()
    hits = []
    for tenant in ("a", "a", "b", "", "b"):
        key = driver.add(prompt_of(13), namespace=tenant)
        driver.run()
        hits.append(driver.cached(key))
    assert hits == [0, 12, 0, 0, 12]


def test_a_tenant_over_its_cap_preempts_itself_and_nobody_else() -> None:
    driver = CoreDriver(num_blocks=60, quotas=Quotas({space("noisy"): Quota(cap=8)}))
    noisy = [driver.add(prompt_of(9, start=50 + start), 20, namespace="noisy") for start in range(4)]
    quiet = [driver.add(prompt_of(9, start=start), 20, namespace="quiet") for start in range(3)]  # come last
    driver.run()
    for key in quiet + noisy:
        assert driver.output(key) == continuation(driver.prompts[key], 20)
    assert [driver.finished[key].num_preemptions for key in quiet] == [0, 0, 0]
    assert sum(driver.finished[key].num_preemptions for key in noisy) > 0


def test_a_request_larger_than_its_tenants_cap_is_refused_with_the_limit() -> None:
    driver = CoreDriver(num_blocks=60, quotas=Quotas({space("small"): Quota(cap=2)}))
    with pytest.raises(ContextTooLong, match="pool 8 tokens"):
        driver.add(prompt_of(8), namespace="small")
    key = driver.add(prompt_of(5), max_tokens=None, namespace="small")
    driver.run()
    assert driver.finish_reasons[key] == {0: "length"}
    assert len(driver.output(key)) == 3


def test_a_noisy_tenant_cannot_keep_another_from_its_floor() -> None:
    """The quiet tenant's request starts in the step after it came, though the noisy one has filled what it may."""
    driver = CoreDriver(num_blocks=41, max_num_seqs=16, quotas=Quotas({space("quiet"): Quota(floor=10)}))
    for number in range(30):
        driver.add(prompt_of(20, start=number), 30, namespace="noisy")
    for _ in range(25):
        driver.step()
    assert driver.core._pool.num_free >= 10
    quiet = driver.add(prompt_of(25, start=99), 4, namespace="quiet", priority=-1)
    before = driver.core.stats().preemptions
    driver.step()
    assert quiet in driver.started or driver.core._requests[quiet].cached_tokens is not None
    assert driver.core.stats().preemptions == before
    driver.run()
    assert driver.output(quiet) == continuation(driver.prompts[quiet], 4)
    assert len(driver.finished) == 31


def test_the_service_opens_the_pool_that_its_configuration_asks_for() -> None:
    pool, cache = open_pool(CacheConfig(), 11)
    assert cache is not None
    assert (pool.ledger is not None, pool.quotas, cache.has_sub_blocks) == (True, None, False)
    assert open_pool(CacheConfig(prefix_caching=False), 11)[1] is None

    pool, cache = open_pool(CacheConfig(policy="cost", sub_blocks=True, tenant_share=0.5), 11)
    assert cache is not None
    assert cache.has_sub_blocks
    a, b = (pool.open(Owner("sequence", name, name.encode())) for name in "ab")
    assert (pool.num_available(a), pool.num_obtainable(a)) == (5, 5)
    pool.take(5, a)
    with pytest.raises(QuotaExceeded):
        pool.take(1, a)
    assert len(pool.take(5, b)) == 5


# ── Quarantine ───────────────────────────────────────────────────────────────────────────────────


def test_damaged_books_cost_a_block_and_no_request() -> None:
    driver = CoreDriver(num_blocks=40)
    keys = [driver.add(prompt_of(9, start=start), 30) for start in range(3)]
    for _ in range(5):
        driver.step()
    pool = driver.core._pool
    victim = driver.core._scheduler.running[0].table.block_ids[-1]
    pool._refs[victim] += 1  # what a lost release leaves behind
    (incident,) = driver.core.audit()
    assert incident.block == victim
    assert "sequence" in incident.reason
    assert driver.core.audit() == []
    driver.run()
    for key in keys:
        assert driver.output(key) == continuation(driver.prompts[key], 30)
    stats = driver.core.stats().pool
    assert (stats.quarantined, stats.total, stats.used, stats.cached + stats.free) == (1, 38, 0, 38)


def test_a_sequence_whose_block_the_books_deny_computes_it_again_and_harms_nobody() -> None:
    driver = CoreDriver(num_blocks=40)
    keys = [driver.add(prompt_of(10, start=start), 20, n=2) for start in range(2)]
    pool, scheduler = driver.core._pool, driver.core._scheduler
    while len(scheduler.running) < 4:
        batch = driver.schedule()
        assert batch is not None
        driver.take(driver.core.apply(driver.compute(batch)))
    victim = scheduler.running[0]  # it has just been forked: its next token needs a copy of the shared last block
    assert victim.table.account is not None
    disputed = victim.table.block_ids[-1]
    del victim.table.account.entries[disputed]
    while (batch := driver.schedule()) is not None:
        driver.take(driver.core.apply(driver.compute(batch)))
    assert pool.quarantined == {disputed}
    driver.core.check()
    for key in keys:
        for index in range(2):
            assert driver.output(key, index) == continuation(driver.prompts[key], 20)
    assert driver.core.stats().preemptions == 1


def test_a_request_that_no_longer_fits_since_the_pool_shrank_fails_and_the_others_go_on() -> None:
    driver = CoreDriver(num_blocks=11, block_size=4, token_budget=64)
    large = driver.add(prompt_of(30), 10)  # needs all ten blocks to its end
    small = driver.add(prompt_of(5, start=3), 4)
    waiting = driver.add(prompt_of(38, start=5), 2)
    driver.step()
    for block in driver.core._pool.free_blocks()[-1:]:
        driver.core._pool.quarantine(block, "a test")
    driver.run()
    assert driver.output(small) == continuation(driver.prompts[small], 4)
    assert {large, waiting} == {*driver.failed}
    assert "9 left in service" in str(driver.failed[waiting])
    assert driver.core.stats().pool.used == 0
    again = driver.add(prompt_of(30), 6)
    driver.run()
    assert driver.output(again) == continuation(driver.prompts[again], 6)
    with pytest.raises(ContextTooLong, match="pool 36 tokens"):
        driver.add(prompt_of(38))


def test_an_idle_core_with_sound_books_has_nothing_to_report() -> None:
    driver = CoreDriver()
    driver.add(prompt_of(9))
    driver.run()
    assert driver.core.audit() == []
