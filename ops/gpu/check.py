"""The checks of ops/gpu/check.sh, each a step in a process of its own with its own time limit; a table of all is printed last.

    python ops/gpu/check.py --out FOLDER [--step N ...] [--dry]

Steps stand in order of value and none stops another: a crash, a poisoned CUDA context or a time limit is one row of the table. `--dry` runs
the same steps on a CPU, with emulated kernels and tiny sizes, so that on the GPU only the GPU can surprise. The steps are in steps.py, speed.py
and whole_model.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

TOTAL_S = 530


def main() -> int:
    """Run the chosen steps; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for step-N.json and step-N.log")
    parser.add_argument("--step", type=int, action="append", help="only this step; may be repeated")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with emulated kernels and tiny sizes")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside is not None:
        return run_inside(options.inside, options.out, options.dry)

    from steps import STEPS

    chosen = options.step or list(range(len(STEPS)))
    unknown = [number for number in chosen if not 0 <= number < len(STEPS)]
    if unknown:
        parser.error(f"there is no step {unknown[0]}; steps are 0 … {len(STEPS) - 1}")
    begin = time.monotonic()
    rows = []
    for number in chosen:
        left_s = TOTAL_S - (time.monotonic() - begin)
        limit_s = STEPS[number].limit_s if not options.dry else 300
        row = run_step(number, options.out, options.dry, limit_s if options.dry else min(limit_s, left_s))
        rows.append(row)
        print(f"step {number} {row['name']}: {row['status']} in {row['seconds']:.0f} s", flush=True)
    (options.out / "summary.json").write_text(json.dumps(rows, indent=1))
    print()
    for row in rows:
        print(f"{row['number']:>2}  {row['name']:<34} {row['status']:<9} {row['seconds']:5.0f} s")
        for line in row["lines"]:
            print(f"      {line}")
    return int(any(row["status"] not in ("ok", "skipped") for row in rows))


def run_step(number: int, out: Path, is_dry: bool, limit_s: float) -> dict[str, Any]:
    """Run one step in a process; what it wrote before it ended counts, however it ended."""
    from steps import STEPS

    result_file = out / f"step-{number}.json"
    result_file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--inside", str(number), "--out", str(out), *(["--dry"] if is_dry else [])]
    begin = time.monotonic()
    status = "time"
    with (out / f"step-{number}.log").open("w") as log:
        if limit_s > 1:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=limit_s, check=False).returncode
                status = {0: "ok", 3: "skipped"}.get(code, "failed")
            except subprocess.TimeoutExpired:
                log.write(f"over the limit of {limit_s:.0f} s\n")
    lines = json.loads(result_file.read_text())["lines"] if result_file.exists() else []
    if status == "failed" and not lines:
        lines = (out / f"step-{number}.log").read_text().splitlines()[-2:]
    return {
        "number": number,
        "name": STEPS[number].name,
        "status": status,
        "seconds": time.monotonic() - begin,
        "lines": lines,
    }


def run_inside(number: int, out: Path, is_dry: bool) -> int:
    """Compute a step in this process; 0 ok, 1 failed, 3 skipped."""
    from bench import Bench, Skipped
    from steps import STEPS

    bench = Bench(out / f"step-{number}.json", is_dry)
    try:
        STEPS[number].run(bench)
    except Skipped as error:
        bench.say(f"skipped: {error}")
        return 3
    except Exception as error:
        traceback.print_exc()
        bench.say(f"{type(error).__name__}: {error}"[:400])
        return 1
    return 0 if not bench.faults else 1


if __name__ == "__main__":
    raise SystemExit(main())
