"""The prepared GPU check, dry: a step that succeeds, one that cannot run here, one that does not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulation.module import missing

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def check(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "ops/gpu/check.sh"), str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHON": sys.executable}
    )


def test_a_dry_run_computes_with_emulated_kernels_and_keeps_what_it_found(tmp_path: Path) -> None:
    result = check(tmp_path, "--dry", "--step", "4", "--step", "11")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = {row["number"]: row for row in json.loads((tmp_path / "summary.json").read_text())}
    assert summary[4]["status"] == "ok"
    assert summary[4]["lines"] == ["cupy-emulated: equal bits, twice and alone"]
    assert summary[11]["status"] == "skipped"
    assert json.loads((tmp_path / "step-4.json").read_text())["faults"] == 0
    assert "equal bits" in result.stdout.splitlines()[-3] + result.stdout.splitlines()[-4]


def test_a_step_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = check(tmp_path, "--dry", "--step", "99")
    assert result.returncode == 2
    assert "steps are 0" in result.stderr
