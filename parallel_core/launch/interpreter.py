"""Which Python runs the ranks, and whether its packages fit.

Owns: the list of what ranks need (requirements-ranks.txt), the rank environment's place and stamp. install.py makes
that environment with the functions here. Imports neither torch nor anything of ComfyUI; starts no rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
else:
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # transformers brings it into every ComfyUI; pip has its own copy elsewhere
        from pip._vendor.packaging.requirements import Requirement

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PARALLEL_DIFFUSION_PYTHON"
_STAMP = "parallel_diffusion_stamp.json"
_CHECK_TIMEOUT_S = 60.0

# Runs in the interpreter that is looked at: metadata only, since importing torch and diffusers takes seconds.
_PROBE = """
import json, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
print(json.dumps(versions))
"""


class RankPythonError(UserError):
    """The Python that should run ranks is missing or lacks packages; the message says which and what to do."""


def rank_env(package_root: Path) -> Path:
    """Where install.py puts the rank environment."""
    return package_root / ".rank_env"


def rank_env_python(package_root: Path) -> Path:
    """The interpreter of the rank environment, whether it exists or not."""
    return rank_env(package_root) / "bin" / "python"


def stamp_path(package_root: Path) -> Path:
    """Written last when the environment is made: without it the environment is unfinished."""
    return rank_env(package_root) / _STAMP


def read_requirements(package_root: Path) -> list[Requirement]:
    """The lines of requirements-ranks.txt."""
    lines = (package_root / "requirements-ranks.txt").read_text(encoding="utf-8").splitlines()
    stripped = (line.split("#")[0].strip() for line in lines)
    return [Requirement(line) for line in stripped if line]


def installed_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Version of each distribution in this interpreter, None where it is missing."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def unmet(requirements: Sequence[Requirement], versions: Mapping[str, str | None]) -> list[str]:
    """One phrase per requirement that `versions` (name -> version or None) does not meet."""
    problems = []
    for requirement in requirements:
        version = versions.get(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing ({requirement} needed)")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is {version} ({requirement} needed)")
    return problems


def host_fingerprint(package_root: Path) -> dict[str, str]:
    """What a rank environment depends on: when any of it changes, the environment is out of date.

    Describes the interpreter that runs this (ComfyUI's). Its paths are resolved: ComfyUI may be started through a
    link to the environment that install.py ran in.
    """
    try:
        torch = metadata.distribution("torch")
        torch_version, torch_folder = torch.version, os.path.realpath(str(torch.locate_file("")))
    except metadata.PackageNotFoundError:
        torch_version, torch_folder = "missing", ""
    lines = "\n".join(sorted(str(requirement) for requirement in read_requirements(package_root)))
    return {
        "requirements": hashlib.sha256(lines.encode()).hexdigest(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "prefix": os.path.realpath(sys.prefix),
        "torch": torch_version,
        "torch_folder": torch_folder,
    }


def rank_env_is_current(package_root: Path) -> bool:
    """Whether install.py finished a rank environment that fits the running interpreter and the requirements."""
    try:
        stamp = json.loads(stamp_path(package_root).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    python = rank_env_python(package_root)
    return os.access(python, os.X_OK) and bool(stamp == host_fingerprint(package_root))


def rank_python(package_root: Path, environ: Mapping[str, str]) -> Path:
    """The interpreter for ranks: PARALLEL_DIFFUSION_PYTHON, else the rank environment, else the running one."""
    chosen = environ.get(VARIABLE)
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not path.is_file() or not os.access(path, os.X_OK):
            what = "is not executable" if path.is_file() else "does not exist"
            raise RankPythonError(
                f"{VARIABLE} is set to {chosen!r}, which {what}. Set it to the full path of a Python "
                "that has the packages of requirements-ranks.txt, or unset it."
            )
        return path
    if rank_env_is_current(package_root):
        return rank_env_python(package_root)
    return Path(sys.executable)


@cache
def check_rank_python(python: Path, package_root: Path = PACKAGE_ROOT) -> None:
    """Raise RankPythonError unless that interpreter has what ranks need. Runs it once; a success is remembered."""
    requirements = read_requirements(package_root)
    problems = unmet(requirements, probe_versions(python, [requirement.name for requirement in requirements]))
    if not problems:
        return
    advice = "Run `python install.py` in this package's folder with ComfyUI's Python and start ComfyUI again"
    if python == Path(sys.executable) and rank_env(package_root).exists():
        advice = f"The rank environment {rank_env(package_root)} is unfinished or out of date. {advice}"
    raise RankPythonError(
        f"Ranks cannot run in this Python ({python}): {'; '.join(problems)}. {advice}, "
        f"or set {VARIABLE} to a Python that has them."
    )


def probe_versions(python: Path, names: Sequence[str]) -> dict[str, str | None]:
    """installed_versions(names) of another interpreter."""
    not_inherited = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")  # as for ranks
    env = {name: value for name, value in os.environ.items() if name not in not_inherited}
    command = [str(python), "-c", _PROBE, *names]
    try:
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RankPythonError(f"The Python for ranks, {python}, cannot be run: {error}") from error
    if done.returncode != 0:
        raise RankPythonError(f"The Python for ranks, {python}, does not work: {done.stderr.strip()[-800:]}")
    # A .pth file of the environment may print; the answer is the last line.
    versions: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return versions
