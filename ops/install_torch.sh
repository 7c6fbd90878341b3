# Install torch before the other requirements, so that the right build is chosen once.
# Keeps a torch that is already there. Without an NVIDIA GPU the CPU build is taken where an index offers one
# (its version carries the "+cpu" label); otherwise the plain release. TORCH_INDEX names another wheel index.
set -eu
pip="$BIN/python -m pip install --quiet --disable-pip-version-check --constraint ops/constraints.txt"
version=$(sed -n 's/^torch==//p' ops/constraints.txt)
if "$BIN/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    exit 0
fi
if [ -n "${TORCH_INDEX:-}" ]; then
    exec $pip --index-url "$TORCH_INDEX" "torch==$version"
fi
if ! command -v nvidia-smi >/dev/null 2>&1 && $pip "torch==$version+cpu" 2>/dev/null; then
    exit 0
fi
exec $pip "torch==$version"
