#!/bin/sh
# Checks everything that only a GPU can show, offline, in under nine minutes. Needs torch, numpy, cupy, numba-cuda and nvcc on the machine.
#
#     sh ops/gpu/check.sh OUT [WHEELS] [options of check.py, e.g. --step 3]
#
# OUT gets a JSON file and a log a step. WHEELS is a folder with the wheels of ops/gpu/wheels.txt: those that the machine lacks are put into
# OUT/packages, without an index. Without it the steps that need the service say what is missing. Try it on a CPU first: check.sh OUT --dry
set -u
OUT=${1:?the folder for results}
shift
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
case ${1:-} in
"" | --*) ;;
*)
    WHEELS=$(cd "$1" && pwd) || exit 1
    shift
    if [ ! -d "$OUT/packages" ]; then
        "$PYTHON" "$(dirname "$0")/missing_wheels.py" "$WHEELS" >"$OUT/wheels.txt" || exit 1
        if [ -s "$OUT/wheels.txt" ]; then
            "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$OUT/packages" --requirement "$OUT/wheels.txt" || exit 1
        fi
    fi
    ;;
esac
cd "$(dirname "$0")/../.." || exit 1
PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$PYTHON" ops/gpu/check.py --out "$OUT" "$@"
