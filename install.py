"""Makes the rank environment where ComfyUI's own packages do not fit. ComfyUI-Manager and comfy-cli run this file.

By hand: run it with the Python that starts ComfyUI, from any folder. It never changes a package of that Python and
never installs torch: ranks get a virtual environment in .rank_env that is laid over ComfyUI's packages, and only what
does not fit is installed there. Knows nothing of ComfyUI itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parent
if sys.version_info < (3, 10):  # noqa: UP036 - this file is what finds it out
    raise SystemExit(f"Parallel Diffusion needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
if str(PACKAGE_ROOT) not in sys.path:  # python -P, or imported from elsewhere
    sys.path.insert(0, str(PACKAGE_ROOT))

from parallel_core.launch import interpreter  # noqa: E402

_PINNED = ("torch", "torchvision", "torchaudio", "numpy")
_NO_INDEX = ("Failed to establish a new connection", "NewConnectionError", "name resolution", "Network is unreachable")
_LINES_OF_FAILURE = 25
_VERIFY = """
import json, torch, accelerate
from diffusers import FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel
print(json.dumps([torch.__version__, torch.__file__]))
"""


class InstallError(Exception):
    """The rank environment cannot be made; the message says why and what to do."""


def say(text: str) -> None:
    """One line for the person or the manager that runs this."""
    sys.stdout.write(f"[Parallel Diffusion] {text}\n")
    sys.stdout.flush()


def host_folders() -> list[str]:
    """Every folder from which the running Python (ComfyUI's) imports installed packages, in its order."""
    folders: dict[str, None] = {}
    for entry in sys.path:
        path = Path(entry).absolute() if entry else PACKAGE_ROOT
        if path == PACKAGE_ROOT or not path.is_dir():
            continue
        if path.name in ("site-packages", "dist-packages") or any(path.glob("*.dist-info")):
            folders[str(path)] = None
    return list(folders)


def make_venv(folder: Path) -> None:
    """An empty virtual environment whose pip is the host's where it has one, its own else."""
    own_pip = importlib.util.find_spec("pip") is None
    advice = "On Debian and Ubuntu: apt install python3-venv. Then run install.py again."
    try:
        import venv
    except ModuleNotFoundError as error:
        raise InstallError(f"This Python ({sys.executable}) has no venv module. {advice}") from error
    if own_pip and importlib.util.find_spec("ensurepip") is None:
        raise InstallError(f"This Python ({sys.executable}) has neither pip nor ensurepip. {advice}")
    venv.EnvBuilder(symlinks=True, with_pip=own_pip).create(folder)


def lay_over_host(python: Path) -> None:
    """Append the host's package folders to the environment's path, so that its own packages win."""
    purelib = run_rank_python(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    # addsitedir, not bare paths: the host's own .pth files count too. ascii(): a .pth is read in the locale's encoding.
    lines = [f"import site; site.addsitedir({ascii(folder)})\n" for folder in host_folders()]
    (Path(purelib) / "parallel_diffusion_host.pth").write_text("".join(lines), encoding="ascii")


def rank_environ() -> dict[str, str]:
    """Variables for the environment's Python: nothing that points elsewhere, the user's pip settings kept."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PIP_USER"] = "0"  # pip.conf may say user = true, which pip refuses in a virtual environment
    return env


def run_rank_python(python: Path, code: str) -> str:
    """The last line that the code prints."""
    done = subprocess.run([str(python), "-c", code], env=rank_environ(), cwd="/", capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallError(f"The rank environment's Python failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout.splitlines()[-1]


def install_packages(python: Path) -> None:
    """pip install requirements-ranks.txt; the host's torch, torchvision, torchaudio and numpy stay as they are."""
    pins = interpreter.installed_versions(_PINNED)
    constraints = interpreter.rank_env(PACKAGE_ROOT) / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items() if version), "utf-8")
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["-r", str(PACKAGE_ROOT / "requirements-ranks.txt"), "-c", str(constraints)]
    output = []
    with subprocess.Popen(
        command, env=rank_environ(), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line.rstrip())
            # The rest is noise, some of it alarming: pip finds the host's versions and says that it cannot remove them.
            if line.startswith(("Collecting", "  Downloading", "Installing", "Successfully")):
                say(line.split(" (from ")[0].rstrip())
    if pip.returncode == 0:
        return
    for line in output[-_LINES_OF_FAILURE:]:
        say(f"pip: {line}")
    if any(sign in line for line in output for sign in _NO_INDEX):
        raise InstallError(
            "pip cannot reach a package index (its messages are above). Connect this machine and run install.py "
            "again, or point pip at a mirror or a folder of wheels (PIP_INDEX_URL, PIP_FIND_LINKS), or set "
            f"{interpreter.VARIABLE} to a Python that has the packages of requirements-ranks.txt."
        )
    raise InstallError(f"pip could not install what ranks need (exit code {pip.returncode}; its messages are above).")


def verify(python: Path, torch_version: str, torch_file: str) -> None:
    """Import what ranks import, and make sure that torch is the host's, same version and same file."""
    found_version, found_file = json.loads(run_rank_python(python, _VERIFY))
    if os.path.realpath(found_file) != os.path.realpath(torch_file):
        raise InstallError(f"The rank environment imports torch {found_version} from {found_file}, not {torch_file}.")
    requirements = interpreter.read_requirements(PACKAGE_ROOT)
    versions = interpreter.probe_versions(python, [requirement.name for requirement in requirements])
    problems = interpreter.unmet(requirements, versions)
    if versions["torch"] != torch_version:
        problems.append(f"torch is {versions['torch']}, ComfyUI's is {torch_version}")
    if problems:
        raise InstallError(f"The rank environment does not fit: {'; '.join(problems)}.")


def host_torch() -> tuple[str, str]:
    """Version and file of the host's torch, without importing it; InstallError when ranks cannot use it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InstallError(
            f"This Python ({sys.executable}) has no torch, so it is not ComfyUI's. Run install.py with the Python "
            "that starts ComfyUI, for example: /path/to/ComfyUI/venv/bin/python install.py"
        )
    version = metadata.version("torch")
    requirements = [item for item in interpreter.read_requirements(PACKAGE_ROOT) if item.name == "torch"]
    problems = interpreter.unmet(requirements, {"torch": version})
    if problems:
        raise InstallError(f"ComfyUI's torch is too old for ranks: {problems[0]}. Update ComfyUI's torch first.")
    return version, spec.origin


def remove_rank_env() -> None:
    """Delete .rank_env, whatever it is."""
    folder = interpreter.rank_env(PACKAGE_ROOT)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def make_rank_env(torch_version: str, torch_file: str) -> None:
    """Make .rank_env from nothing; the stamp is written last, and a failure leaves nothing behind."""
    folder, python = interpreter.rank_env(PACKAGE_ROOT), interpreter.rank_env_python(PACKAGE_ROOT)
    try:
        remove_rank_env()
        make_venv(folder)
        lay_over_host(python)
        install_packages(python)
        say("trying it: importing torch, diffusers and transformers")
        verify(python, torch_version, torch_file)
        fingerprint = json.dumps(interpreter.host_fingerprint(PACKAGE_ROOT), indent=1)
        interpreter.stamp_path(PACKAGE_ROOT).write_text(fingerprint, encoding="utf-8")
    except BaseException:
        with contextlib.suppress(OSError):
            remove_rank_env()
        raise


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Two installs of one package (a manager's and a person's) take turns."""
    import fcntl  # not on Windows, where nothing is installed

    descriptor = os.open(PACKAGE_ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another install.py is at work in this folder; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def install() -> None:
    """Bring the rank environment to what the running Python needs: nothing, an existing one, or a new one."""
    requirements = interpreter.read_requirements(PACKAGE_ROOT)
    names = [requirement.name for requirement in requirements]
    problems = interpreter.unmet(requirements, interpreter.probe_versions(Path(sys.executable), names))
    folder = interpreter.rank_env(PACKAGE_ROOT)
    if not problems:
        remove_rank_env()
        say(f"ComfyUI's own packages fit what ranks need ({sys.executable}): no rank environment needed.")
    elif interpreter.rank_env_is_current(PACKAGE_ROOT):
        say(f"the rank environment is up to date: {folder}")
    else:
        torch_version, torch_file = host_torch()
        say(f"ranks need packages that this Python does not have: {'; '.join(problems)}")
        say(f"making an environment for ranks in {folder}; this Python's packages stay as they are")
        make_rank_env(torch_version, torch_file)
        say(f"done: ranks will run with {interpreter.rank_env_python(PACKAGE_ROOT)}")


def main() -> int:
    """Exit code 0 when ranks can run (or cannot on this system at all, which is said), 1 when something is missing."""
    if sys.platform != "linux":
        say(f"ranks run on Linux and WSL2 only. On this system ({sys.platform}) ComfyUI loads the nodes, but they")
        say("cannot start ranks: nothing is sampled, encoded or decoded in parallel. Nothing was installed.")
        return 0
    try:
        with only_one():
            install()
    except (InstallError, interpreter.RankPythonError) as error:
        say(f"ERROR: {error}")
        return 1
    except OSError as error:
        say(f"ERROR: {error}. The folder {PACKAGE_ROOT} must be writable, with about 300 MB free on its disk.")
        return 1
    except subprocess.CalledProcessError as error:
        say(f"ERROR: {error}. Making a virtual environment failed; on Debian and Ubuntu: apt install python3-venv.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
