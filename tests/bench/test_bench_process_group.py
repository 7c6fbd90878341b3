"""Starting, watching and ending a measured program."""

import os
import sys
from pathlib import Path

import pytest
from environments import PeerUnavailable
from peers import StaticBatchPeer
from process_group import ProcessGroup, all_processes, parse_stat
from prompts import Prompt

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")


def test_a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    facts = parse_stat("42 (a) b (c) S 1 41 40 0 -1 0 0 0 0 0 10 20 30 40 20 0 1 0 99 1000 7 0")
    assert (facts.pid, facts.session_id, facts.cpu_s) == (42, 40, 100 / ticks)
    assert facts.rss_bytes == 7 * os.sysconf("SC_PAGE_SIZE")


def test_stopping_ends_children_that_outlive_their_parent_and_ignore_the_signal(tmp_path: Path) -> None:
    child = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    group = ProcessGroup([sys.executable, "-c", parent], env=os.environ, log=tmp_path / "log", pipes=True)
    assert group.stdout.readline() == b"up\n"
    pids = {facts.pid for facts in group.members()}
    assert len(pids) == 2
    assert group.cpu_s() > 0
    assert group.peak_rss_bytes() >= group.pss_bytes() > 0
    group.stop(patience_s=5)
    assert group.members() == []
    assert pids.isdisjoint(facts.pid for facts in all_processes())


WORKER = """
import json, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    n = len(batch["prompts"])
    if batch["prompts"][0] == "die":
        sys.exit(3)
    print(json.dumps({"step_s": [0.5, 0.75], "prompt_tokens": [len(p.split()) for p in batch["prompts"]],
                      "output_tokens": [batch["max_tokens"] - (p == "short") for p in batch["prompts"]]}), flush=True)
"""


def worker(tmp_path: Path, code: str) -> ProcessGroup:
    return ProcessGroup([sys.executable, "-c", code], env=os.environ, log=tmp_path / "log", pipes=True)


def test_a_static_batch_peer_times_each_row_by_its_batch(tmp_path: Path) -> None:
    group = worker(tmp_path, WORKER)
    try:
        peer = StaticBatchPeer(group)
        answers = peer.run([Prompt("a b", 2, 2), Prompt("c", 1, 2), Prompt("short", 1, 2), Prompt("d e", 1, 2)], 2)
        assert [answer.error is None for answer in answers] == [True, True, False, False]
        assert answers[0].due == answers[1].due < answers[2].due == answers[3].due
        assert answers[0].first == pytest.approx(answers[0].due + 0.5)
        assert answers[0].gaps == pytest.approx([0.25])
        (dead,) = peer.run([Prompt("die", 1, 2)], 1)
        assert dead.error == "the program ended, or took too long"
    finally:
        group.stop()


def test_a_program_that_ends_before_it_is_ready_is_unavailable(tmp_path: Path) -> None:
    group = worker(tmp_path, "raise SystemExit(4)")
    try:
        with pytest.raises(PeerUnavailable, match="before it was ready"):
            StaticBatchPeer(group)
    finally:
        group.stop()
