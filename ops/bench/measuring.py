"""Measures one peer's turn of a round: starts it, runs every case on it, stops it.

Not arithmetic over runs (results.py). Invariant: whatever happens in a turn, the peer is stopped and the turn holds what was measured.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cases import Case
from conversation import Passages, Turn, chat_turns
from disturbance import BusyProcess
from environments import PeerUnavailable
from load import Answer, count_cut
from machine import machine_busy_s
from peers import RunningPeer, start
from prompts import WORKLOADS, Prompt, PromptBook, Tokenizer, Workload
from recipes import MAX_CONTEXT_TOKENS, SLOW_PEERS, Place
from report import summarise
from results import MAX_OTHERS_CORES, CaseRun, PeerRun
from serve import default_requests, warm_up
from serve import wall_seconds as wall_seconds_of

from service.simulate import TraceRequest

FIRST = Workload("first", prompt_tokens=16, max_tokens=1)
CHAT_WARM_UPS = 4
CHAT_GRACE_S = 5.0  # after the last arrival's time; what is not through by then waits far beyond any limit
MANY = 16  # from this concurrency on a slow peer gets one request a place, and few to warm up
SETTLE_S = 1.0  # between the last answer and the look at an idle peer


@dataclass(frozen=True, slots=True)
class Plan:
    """What all turns share."""

    place: Place
    cases: Sequence[Case]
    book: str  # the text that prompts are cut from
    tokenizer: Tokenizer
    trace: Sequence[TraceRequest]  # for chats; empty if none are measured
    seed: int
    extra: dict[str, str]  # more arguments, by peer
    max_tokens: int | None  # instead of the chats' own: a quick look
    limit_s: float  # a case is cut after this
    busy_limit_s: float  # a disturbed one after this
    chat_s: float  # W4 sends for so long
    idle_s: float  # a peer with nothing to do is watched for so long, in the first round


@dataclass(frozen=True, slots=True)
class CasePrompts:
    """What a case sends; `turns` instead of `prompts` when arrivals are planned."""

    warm_up: Sequence[Prompt]
    prompts: Sequence[Prompt] = ()
    turns: Sequence[Turn] = ()


def draw_prompts(plan: Plan, round_number: int) -> tuple[Prompt, dict[str, CasePrompts]]:
    """Draw the prompts of a whole round: the first request's, and those of each case by label.

    All from one book, whether a case is measured in this round and on this peer or not: so all peers of a round get the same prompts,
    also when a comparison is interrupted and resumed.
    """
    seed = f"{plan.seed}/{round_number}"
    book = PromptBook(plan.book, seed=seed, tokenizer=plan.tokenizer)
    (first,) = book.take(FIRST, 1)
    drawn = {}
    for case in plan.cases:
        if case.rate is None:
            warm = book.take(warm_up(case.workload), case.concurrency)
            num_requests = default_requests(case.workload, case.concurrency)
            if case.is_disturbed:
                num_requests = max(2, case.concurrency)  # may be ten times slower
            drawn[case.label] = CasePrompts(warm, book.take(case.workload, num_requests))
            continue
        turns = chat_turns(
            plan.trace,
            Passages(plan.book, plan.tokenizer, seed),
            rate=case.rate,
            duration_s=plan.chat_s,
            max_context=MAX_CONTEXT_TOKENS,
            seed=seed,
        )
        if plan.max_tokens:
            turns = [replace(turn, prompt=replace(turn.prompt, max_tokens=plan.max_tokens)) for turn in turns]
        drawn[case.label] = CasePrompts(book.take(warm_up(WORKLOADS["w1"]), CHAT_WARM_UPS), turns=turns)
    return first, drawn


def take_turn(turn: PeerRun, cases: Sequence[Case], plan: Plan, save: Callable[[], None]) -> None:
    """Start the turn's peer, measure `cases` on it, and stop it; `save` is called after each.

    A turn that was interrupted keeps the cases it has.
    """
    first, prompts = draw_prompts(plan, turn.round_number)
    log = plan.place.work_dir / "logs" / f"{turn.peer}-{turn.round_number}.log"
    turn.failure = None
    try:
        running = start(turn.peer, plan.place, plan.extra.get(turn.peer, ""), log)
    except PeerUnavailable as error:
        turn.failure = str(error)
        save()
        return
    try:
        first_token_s = first_token_seconds(running, first)
        if turn.first_token_s is None:
            turn.first_token_s = first_token_s
        for case in cases:
            turn.cases.append(measure_case(case, running, prompts[case.label], plan, is_slow=turn.peer in SLOW_PEERS))
            print(f"  {progress(turn.cases[-1])}", file=sys.stderr, flush=True)
            save()
        if turn.round_number == 0 and plan.idle_s:
            turn.idle_cores = idle_cores(running, plan.idle_s)
        turn.pss_bytes = running.group.pss_bytes()
        turn.peak_rss_bytes = max(turn.peak_rss_bytes or 0, running.group.peak_rss_bytes())
    except PeerUnavailable as error:
        turn.failure = str(error)
    finally:
        running.group.stop()
    save()


def first_token_seconds(running: RunningPeer, prompt: Prompt) -> float:
    """Return the seconds from the program's start to its first token. Raises PeerUnavailable if none comes."""
    (answer,) = running.run([prompt], 1)
    if answer.error is not None or answer.first is None:
        raise PeerUnavailable(f"the first request failed: {answer.error}")
    return answer.first - running.group.started


def measure_case(case: Case, running: RunningPeer, drawn: CasePrompts, plan: Plan, *, is_slow: bool) -> CaseRun:
    """Warm up, undisturbed, with one short request for each place; then measure."""
    warm, prompts = drawn.warm_up, drawn.prompts
    if is_slow and case.concurrency >= MANY:
        warm, prompts = warm[:CHAT_WARM_UPS], prompts[: case.concurrency]
    running.run(warm, max(1, case.concurrency))
    with BusyProcess() if case.is_disturbed else contextlib.nullcontext() as busy:
        busy_s, peer_s, own_s = machine_busy_s(), running.group.cpu_s(), time.process_time()
        neighbour_s = busy.cpu_s() if busy else 0.0
        begin = time.perf_counter()
        if case.rate is None:
            limit_s = plan.busy_limit_s if case.is_disturbed else plan.limit_s
            answers = running.run(prompts, case.concurrency, limit_s)
        else:
            answers = running.replay(drawn.turns, plan.chat_s + CHAT_GRACE_S)
            prompts = [turn.prompt for turn in drawn.turns]
        wall_s = wall_seconds_of(answers, begin)
        if case.rate is not None:
            wall_s = max(wall_s, plan.chat_s)  # the time of the chats, also when the last one begins early
        elapsed = time.perf_counter() - begin
        neighbour_s = busy.cpu_s() - neighbour_s if busy else 0.0
        peer_s, own_s = running.group.cpu_s() - peer_s, time.process_time() - own_s
        others_s = machine_busy_s() - busy_s - peer_s - own_s - neighbour_s
    count_cut_answers(answers, prompts, plan.tokenizer)
    return CaseRun(
        case.label,
        summarise(answers, wall_s),
        peer_s,
        max(0.0, others_s / elapsed),
        busy_cores=neighbour_s / elapsed if busy else None,
    )


def count_cut_answers(answers: Sequence[Answer], prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    """Count the tokens of the answers that were cut. Answers are in the order of the prompts, the last ones may lack."""
    for answer, prompt in zip(answers, prompts, strict=False):
        if answer.is_cut:
            count_cut(answer, prompt, tokenizer)


def idle_cores(running: RunningPeer, seconds: float) -> float:
    """Return the cores that a peer keeps busy with nothing to do."""
    time.sleep(SETTLE_S)
    before = running.group.cpu_s()
    time.sleep(seconds)
    return (running.group.cpu_s() - before) / seconds


def progress(run: CaseRun) -> str:
    """Write one line about a run that has just ended."""
    line = f"{run.label}: {run.summary.output_tokens_per_s:.1f} out tok/s"
    if run.summary.num_cut:
        line += f"; {run.summary.num_cut} requests cut"
    if run.others_cores > MAX_OTHERS_CORES:
        line += f"; NOISY, others kept {run.others_cores:.2f} cores busy"
    if not run.is_good:
        line += f"; FAILED {run.summary.errors}"
    return line
