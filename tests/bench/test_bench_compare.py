"""A whole comparison, with two small programs as peers: one that behaves and one that can be told not to."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare
import measuring
import pytest
import recipes
from recipes import Place, Recipe, free_port

# An OpenAI-like server on the standard library: not ready at first, one token a chunk. It counts prompt tokens by
# words, and stops early for prompts of argv[2] words.
SERVER = """
import http.server, json, sys
port, short = int(sys.argv[1]), int(sys.argv[2])
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def do_GET(self):
        asked.append(self.path)
        self.send_response(503 if self.path == "/readyz" and len(asked) < 3 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "fake"}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "fake" and len(asked) == 4, asked
        num_in = len(body["prompt"].split())
        num_out = body["max_tokens"] - (num_in == short)
        events = [{"choices": [{"text": "x"}]}] * num_out
        events.append({"choices": [], "usage": {"prompt_tokens": num_in, "completion_tokens": num_out}})
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_peer(place: Place, extra: Sequence[str]) -> Recipe:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), *(extra or ["0"])]
    return Recipe(command, port=port, ready_path="/readyz", model="")


def broken_peer(place: Place, extra: Sequence[str]) -> Recipe:
    return Recipe([sys.executable, "-c", "raise SystemExit('no such model')"], port=free_port(), ready_path="/")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, recipe in (("ours", fake_peer), ("theirs", fake_peer), ("broken", broken_peer)):
        monkeypatch.setitem(recipes.RECIPES, name, recipe)
    words = {"[?]": 0}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[?]"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "model.gguf").touch()
    return [
        *("--model", str(tmp_path / "model.gguf"), "--tokenizer", str(tmp_path / "tokenizer.json")),
        *("--work-dir", str(tmp_path / "work"), "--json", str(tmp_path / "out.json"), "--max-tokens", "5"),
        *("--no-roofline", "--idle-seconds", "0"),
    ]


def turns(arguments: list[str]) -> list[Any]:
    found: list[Any] = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())["turns"]
    return found


def test_peers_take_turns_and_every_round_has_its_ratio(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--peers", "ours", "theirs", "--rounds", "2", "--cases", "w1:2", "w3:1"]
    assert compare.main([*arguments, *chosen]) == 0
    assert [(turn["peer"], turn["round_number"]) for turn in turns(arguments)] == [
        ("ours", 0),
        ("theirs", 0),
        ("theirs", 1),
        ("ours", 1),
    ]
    for turn in turns(arguments):
        assert turn["failure"] is None
        assert isinstance(turn["first_token_s"], float)
        assert turn["peak_rss_bytes"]
        first, second = turn["cases"]
        assert (first["label"], second["label"]) == ("w1 c=2", "w3 c=1")
        assert (first["summary"]["prompt_tokens"], first["summary"]["output_tokens"]) == (4 * 200, 4 * 5)
        assert (second["summary"]["prompt_tokens"], second["summary"]["output_tokens"]) == (3 * 1900, 3 * 5)
    printed = capsys.readouterr().out
    assert "### w1 c=2" in printed
    assert "ours ÷ peer" in printed
    assert "### Start, memory, idle" in printed


def test_a_peer_that_stops_early_fails_the_comparison_and_has_no_number(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--peers", "ours", "theirs", "--rounds", "1", "--cases", "w1:1", "--extra", "theirs=200"]
    assert compare.main([*arguments, *chosen]) == 1
    printed = capsys.readouterr()
    assert "FAILED theirs, round 1, w1 c=1: 3 x asked for 5 new tokens, got 4" in printed.err
    (row,) = [line for line in printed.out.splitlines() if line.startswith("| theirs |      0 |")]
    assert "–" in row


def test_a_peer_that_cannot_start_is_reported_with_its_log_and_the_others_go_on(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--peers", "ours", "broken", "--rounds", "1", "--cases", "w1:1"]
    assert compare.main([*arguments, *chosen]) == 1
    printed = capsys.readouterr().err
    assert "ended with status 1 before it was ready" in printed
    assert "no such model" in printed
    assert [turn["failure"] is None for turn in turns(arguments)] == [True, False]


def test_an_interrupted_comparison_goes_on_where_it_stopped(arguments: list[str]) -> None:
    chosen = [*arguments, "--peers", "ours", "theirs", "--rounds", "1", "--cases", "w1:1", "w3:1"]
    assert compare.main(chosen) == 0
    out = Path(arguments[arguments.index("--json") + 1])
    whole = json.loads(out.read_text())
    kept = whole["turns"][1]["cases"].pop()
    assert kept["label"] == "w3 c=1"
    out.write_text(json.dumps(whole))
    assert compare.main([*chosen, "--resume"]) == 0
    ours, theirs = turns(arguments)
    assert ours == whole["turns"][0]  # not measured again
    assert [case["label"] for case in theirs["cases"]] == ["w1 c=1", "w3 c=1"]
    assert theirs["cases"][0] == whole["turns"][1]["cases"][0]
    assert theirs["cases"][1]["summary"]["prompt_tokens"] == kept["summary"]["prompt_tokens"]


def test_another_comparison_is_not_gone_on_with(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [*arguments, "--peers", "ours", "--rounds", "1", "--cases", "w1:1"]
    assert compare.main(chosen) == 0
    assert compare.main([*chosen, "--resume", "--seed", "2"]) == 1
    assert "was begun with another seed: 1" in capsys.readouterr().err


def test_files_of_one_session_become_one_report(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for peer in ("ours", "theirs"):
        chosen = ["--peers", peer, "--rounds", "1", "--cases", "w1:1", "--json", str(tmp_path / f"{peer}.json")]
        assert compare.main([*arguments, *chosen]) == 0
    capsys.readouterr()
    files = [str(tmp_path / f"{peer}.json") for peer in ("ours", "theirs")]
    assert compare.main([*arguments, "--report", *files]) == 0
    assert [turn["peer"] for turn in turns(arguments)] == ["ours", "theirs"]
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("| theirs |      1 |")]
    assert "–" not in row.split("|")[-3]  # there is a ratio


def test_a_case_of_some_rounds_and_a_peer_of_some_cases_are_left_out_elsewhere(arguments: list[str]) -> None:
    chosen = ["--peers", "ours", "theirs", "--rounds", "2", "--cases", "w1:1", "w1:2@1", "--only", "theirs=w1:1"]
    assert compare.main([*arguments, *chosen]) == 0
    measured = {
        (turn["peer"], turn["round_number"]): [case["label"] for case in turn["cases"]] for turn in turns(arguments)
    }
    assert measured == {
        ("ours", 0): ["w1 c=1", "w1 c=2"],
        ("ours", 1): ["w1 c=1"],
        ("theirs", 0): ["w1 c=1"],
        ("theirs", 1): ["w1 c=1"],
    }


def test_a_slow_peer_gets_the_first_half_of_the_requests_of_a_large_load(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SLOW_PEERS", {"theirs"})
    assert compare.main([*arguments, "--peers", "ours", "theirs", "--rounds", "1", "--cases", "w1:4", "w1:16"]) == 0
    counts = [[case["summary"]["num_requests"] for case in turn["cases"]] for turn in turns(arguments)]
    assert counts == [[8, 32], [8, 16]]


def test_chats_and_a_busy_neighbour_are_measured_and_reported(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--peers", "ours", "--rounds", "1", "--cases", "w1:2", "w1:2+busy", "w4:4", "--chat-seconds", "2"]
    # The fake counts words; the trace's lengths are counted in the model's tokens.
    assert compare.main([*arguments, *chosen]) == 0
    (turn,) = turns(arguments)
    calm, busy, chats = turn["cases"]
    assert calm["busy_cores"] is None
    assert busy["busy_cores"] is not None
    assert chats["summary"]["num_requests"] == 8
    assert chats["summary"]["output_tokens"] == 8 * 5
    printed = capsys.readouterr().out
    assert "### Beside one busy process" in printed
    assert "goodput req/s" in printed


def test_prompts_do_not_depend_on_what_else_is_measured_in_a_round(arguments: list[str]) -> None:
    args = compare.parse_arguments([*arguments, "--peers", "ours", "--cases", "w1:1", "w1:2@1", "w3:1"])
    place = compare.prepare(args)
    plan = measuring.Plan(
        place=place,
        cases=args.cases,
        book=args.text.read_text(),
        tokenizer=compare.read_tokenizer(args.tokenizer),
        trace=(),
        seed=1,
        extra={},
        max_tokens=None,
        limit_s=1.0,
        busy_limit_s=1.0,
        chat_s=1.0,
        idle_s=0.0,
    )
    first, drawn = measuring.draw_prompts(plan, 0)
    again = measuring.draw_prompts(plan, 0)
    assert (first, drawn) == again
    assert drawn != measuring.draw_prompts(plan, 1)[1]
    texts = [prompt.text for case in drawn.values() for prompt in [*case.warm_up, *case.prompts]]
    assert len({text.split()[0] for text in texts}) == len(texts)


@pytest.mark.parametrize("case", ["w9:1", "w1:0", "w1:many", "w1"])
def test_a_case_that_does_not_exist_is_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--cases", case])
    assert case in capsys.readouterr().err
