#!/bin/sh
# Checks everything that only a GPU can show, offline, in under nine minutes. Needs torch, numpy, cupy, numba-cuda and nvcc on the machine.
#
#     sh ops/gpu/check.sh OUT [WHEELS] [options of check.py, e.g. --step 3]
#
# OUT gets a JSON file and a log a step. WHEELS is a folder with the wheels of ops/gpu/wheels.txt, for what the machine lacks; without it
# the steps that need the service (golden tokens) say what is missing. Try it on a CPU first: sh ops/gpu/check.sh OUT --dry
set -u
OUT=${1:?the folder for results}
shift
PYTHON=${PYTHON:-python3}
cd "$(dirname "$0")/../.." || exit 1
case ${1:-} in
"" | --*) ;;
*)
    WHEELS=$1
    shift
    if [ ! -x "$OUT/venv/bin/python" ]; then
        "$PYTHON" -m venv --system-site-packages "$OUT/venv" || exit 1
        "$OUT/venv/bin/python" -m pip install --quiet --no-index --find-links "$WHEELS" --no-deps "$WHEELS"/*.whl || exit 1
    fi
    PYTHON=$OUT/venv/bin/python
    ;;
esac
exec "$PYTHON" ops/gpu/check.py --out "$OUT" "$@"
