"""The GPU check where there is no GPU: its limits, the wheels it takes, and a step of the dry run as the script starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops/gpu"


def run(code: str) -> str:
    """Run Python beside the check's own modules, which are scripts and no package."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_limits_of_all_steps_fit_into_nine_minutes() -> None:
    steps, total = json.loads(
        run("import json, check, steps\nprint(json.dumps([[(s.name, s.limit_s) for s in steps.STEPS], check.TOTAL_S]))")
    )
    assert sum(limit for _, limit in steps) <= total < 9 * 60
    assert len({name for name, _ in steps}) == len(steps) >= 12


def test_only_wheels_of_what_is_not_installed_are_taken(tmp_path: Path) -> None:
    for name in ("pytest-1.0-py3-none-any.whl", "no_such_thing-2.0-py3-none-any.whl", "readme.txt"):
        (tmp_path / name).touch()
    found = run(f"import missing_wheels, pathlib; print(*missing_wheels.missing(pathlib.Path({str(tmp_path)!r})))")
    assert found.split() == [str(tmp_path / "no_such_thing-2.0-py3-none-any.whl")]


@pytest.mark.slow
def test_a_step_of_the_dry_run_reports_into_the_folder_and_an_unknown_step_is_refused(tmp_path: Path) -> None:
    command = ["sh", str(FOLDER / "check.sh"), str(tmp_path / "out"), "--dry"]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(
        [*command, "--step", "0"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "facts" in result.stdout
    [row] = json.loads((tmp_path / "out/summary.json").read_text())
    assert (row["number"], row["status"]) == (0, "ok")
    assert any("reference: can run" in line for line in row["lines"])
    refused = subprocess.run(
        [*command, "--step", "99"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert refused.returncode == 2
    assert "no step 99" in refused.stderr
