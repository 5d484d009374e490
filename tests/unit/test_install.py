"""Which Python runs the ranks, and install.py that makes one.

The end-to-end cases run a copy of install.py with a small host environment (a venv with an invented torch) and a
folder of invented wheels instead of a package index, so that they need no network and a few seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import install
from parallel_core.launch import interpreter
from parallel_core.launch.interpreter import RankPythonError

ROOT = Path(__file__).resolve().parents[2]
FITTING = {
    "torch": "2.13.0",
    "diffusers": "0.42.1",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "huggingface-hub": "2.4.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "sentencepiece": "0.2.3",
    "gguf": "0.19.0",
    "torchao": "0.18.0",
    "protobuf": "7.36.2",
    "numpy": "2.4.6",
    "Pillow": "13.0.0",
}
COMFYUI_WITHOUT_DIFFUSERS = {**FITTING, "transformers": "4.57.6", "huggingface-hub": "0.36.2", "diffusers": ""}


def site_packages(environment: Path) -> Path:
    version = ".".join(map(str, sys.version_info[:2]))
    return environment / "lib" / f"python{version}" / "site-packages"


def pretend_installed(environment: Path, versions: dict[str, str]) -> None:
    """Metadata (and, for torch, a module) of distributions that are not there."""
    for name, version in versions.items():
        if version:
            info = site_packages(environment) / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    torch = site_packages(environment) / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text(f"__version__ = {versions['torch']!r}\n")


def make_host(folder: Path, versions: dict[str, str]) -> Path:
    """A venv that stands for ComfyUI's; returns its Python. Its pip is the one that runs the tests."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    pretend_installed(folder, versions)
    import pip

    (site_packages(folder) / "pip").symlink_to(Path(pip.__file__).parent)
    return folder / "bin" / "python"


def make_wheel(folder: Path, name: str, version: str, code: str = "", requires: tuple[str, ...] = ()) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", code)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what install.py needs, in a folder with a space in its name."""
    folder = tmp_path / "custom nodes" / "our pack-2"
    folder.mkdir(parents=True)
    for name in ("install.py", "requirements-ranks.txt"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("__init__.py", "errors.py", "launch/__init__.py", "launch/interpreter.py"):
        (folder / "parallel_core" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "parallel_core" / name, folder / "parallel_core" / name)
    return folder


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Everything ranks need and a ComfyUI without diffusers does not have."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, "diffusers", "0.42.1", "class FluxTransformer2DModel: ...")
    make_wheel(folder, "transformers", "5.24.0", "class CLIPTextModel: ...\nclass T5EncoderModel: ...")
    make_wheel(folder, "accelerate", "1.15.0")
    make_wheel(folder, "huggingface-hub", "2.4.0")
    return folder


@pytest.fixture
def run_install(package: Path, wheels: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the copy of install.py with a host's Python, from a folder that is not its own."""

    def run(python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        env.update(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), PIP_NO_CACHE_DIR="1")
        env.update(variables)
        command = [str(python), str(package / "install.py")]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """The Python of a ComfyUI that has transformers 4.57 and no diffusers, and does not need accelerate."""
    return make_host(tmp_path / "host", {**COMFYUI_WITHOUT_DIFFUSERS, "accelerate": ""})


def test_makes_an_environment_over_comfyuis_torch(run_install, comfyui: Path, package: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in site_packages(tmp_path / "host").iterdir())

    done = run_install(comfyui)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "diffusers is missing" in done.stdout and "transformers is 4.57.6" in done.stdout
    rank_python = package / ".rank_env" / "bin" / "python"
    code = "import torch, transformers, diffusers; print(torch.__file__); print(transformers.__file__)"
    torch_file, transformers_file = subprocess.check_output([rank_python, "-c", code], text=True).splitlines()
    assert Path(torch_file) == site_packages(tmp_path / "host") / "torch" / "__init__.py"
    assert Path(transformers_file).is_relative_to(package / ".rank_env")
    assert sorted(path.name for path in site_packages(tmp_path / "host").iterdir()) == before
    assert not list(site_packages(package / ".rank_env").glob("torch*"))


def test_a_second_run_does_nothing_and_is_quick(run_install, comfyui: Path, package: Path) -> None:
    run_install(comfyui)
    made = (package / ".rank_env" / "pyvenv.cfg").stat().st_mtime_ns

    started = time.monotonic()
    again = run_install(comfyui)

    assert again.returncode == 0 and "up to date" in again.stdout
    assert time.monotonic() - started < 5  # 0.3 s on an idle machine
    assert (package / ".rank_env" / "pyvenv.cfg").stat().st_mtime_ns == made


def test_an_unfinished_environment_is_made_again(run_install, comfyui: Path, package: Path) -> None:
    (package / ".rank_env" / "bin").mkdir(parents=True)
    (package / ".rank_env" / "bin" / "python").write_text("half of a file")

    done = run_install(comfyui)

    assert done.returncode == 0, done.stdout
    assert interpreter.stamp_path(package).exists()


def test_changed_requirements_make_it_again(run_install, comfyui: Path, package: Path, wheels: Path) -> None:
    run_install(comfyui)
    make_wheel(wheels, "peft", "0.21.2")
    with (package / "requirements-ranks.txt").open("a") as file:
        file.write("peft>=0.20\n")

    done = run_install(comfyui)

    assert "peft is missing" in done.stdout
    assert (site_packages(package / ".rank_env") / "peft").is_dir()


def test_makes_nothing_where_comfyuis_packages_fit_and_removes_an_old_environment(
    run_install, tmp_path: Path, package: Path
) -> None:
    (package / ".rank_env").mkdir()

    done = run_install(make_host(tmp_path / "host", FITTING))

    assert done.returncode == 0 and "fit what ranks need" in done.stdout
    assert not (package / ".rank_env").exists()


def test_never_moves_torch_even_when_a_package_asks_for_it(
    run_install, comfyui: Path, package: Path, wheels: Path
) -> None:
    make_wheel(wheels, "torch", "3.0.0", "__version__ = '3.0.0'")
    make_wheel(wheels, "accelerate", "1.15.0", requires=("torch>=3",))

    done = run_install(comfyui)

    assert done.returncode == 1
    assert "torch==2.13.0" in done.stdout  # pip names the pin that stands in the way
    assert not (package / ".rank_env").exists()


def test_without_a_network_says_so_and_leaves_nothing(run_install, comfyui: Path, package: Path) -> None:
    unreachable = dict(PIP_NO_INDEX="0", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1", PIP_FIND_LINKS="")

    done = run_install(comfyui, **unreachable)

    assert done.returncode == 1
    assert "cannot reach a package index" in done.stdout and interpreter.VARIABLE in done.stdout
    assert not (package / ".rank_env").exists()


def test_a_python_without_torch_is_not_comfyuis(run_install, package: Path) -> None:
    done = run_install(Path(sysconfig.get_config_var("BINDIR")) / "python3", PYTHONNOUSERSITE="1")

    assert done.returncode == 1
    assert "has no torch" in done.stdout and "the Python that starts ComfyUI" in done.stdout


def test_an_old_torch_is_named(run_install, tmp_path: Path) -> None:
    done = run_install(make_host(tmp_path / "host", {**COMFYUI_WITHOUT_DIFFUSERS, "torch": "2.4.1"}))

    assert done.returncode == 1
    assert "torch is 2.4.1 (torch>=2.6 needed)" in done.stdout


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems_are_told_what_does_not_work(
    system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(install, "install", lambda: pytest.fail("must not install anything"))

    assert install.main() == 0
    assert "Linux and WSL2 only" in capsys.readouterr().out


def test_a_python_without_venv_names_the_debian_package(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "PACKAGE_ROOT", package)
    monkeypatch.setattr(interpreter, "probe_versions", lambda python, names: dict.fromkeys(names))
    monkeypatch.setattr(install, "host_torch", lambda: ("2.13.0", "torch/__init__.py"))
    monkeypatch.setitem(sys.modules, "venv", None)

    assert install.main() == 1
    assert "apt install python3-venv" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(install, "PACKAGE_ROOT", package)
    monkeypatch.setattr(interpreter, "probe_versions", lambda python, names: dict.fromkeys(names))
    monkeypatch.setattr(install, "host_torch", lambda: ("2.13.0", "torch/__init__.py"))
    monkeypatch.setattr(install, "make_venv", refuse)

    assert install.main() == 1
    out = capsys.readouterr().out
    assert "Permission denied" in out and f"{package} must be writable" in out


def make_current(package: Path) -> Path:
    """A rank environment with a stamp that fits the running interpreter; returns its Python."""
    python = interpreter.rank_env_python(package)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    interpreter.stamp_path(package).write_text(json.dumps(interpreter.host_fingerprint(package)))
    return python


def test_ranks_run_in_the_rank_environment_while_its_stamp_fits(package: Path) -> None:
    assert interpreter.rank_python(package, {}) == Path(sys.executable)
    python = make_current(package)
    assert interpreter.rank_python(package, {}) == python


def test_a_comment_in_the_requirements_does_not_make_the_stamp_stale(package: Path) -> None:
    python = make_current(package)
    with (package / "requirements-ranks.txt").open("a") as file:
        file.write("# a remark\n")
    assert interpreter.rank_python(package, {}) == python


def test_a_stale_stamp_means_comfyuis_own_python(package: Path) -> None:
    make_current(package)
    with (package / "requirements-ranks.txt").open("a") as file:
        file.write("peft>=0.20\n")
    assert interpreter.rank_python(package, {}) == Path(sys.executable)


@pytest.mark.parametrize("content", ["", "not json", '{"python": "2.7"}'])
def test_a_broken_stamp_means_comfyuis_own_python(package: Path, content: str) -> None:
    make_current(package)
    interpreter.stamp_path(package).write_text(content)
    assert interpreter.rank_python(package, {}) == Path(sys.executable)


def test_an_environment_whose_base_python_is_gone_is_not_used(package: Path) -> None:
    python = make_current(package)
    python.unlink()
    python.symlink_to(package / "no-such-python")
    assert interpreter.rank_python(package, {}) == Path(sys.executable)


def test_the_variable_wins(package: Path) -> None:
    make_current(package)
    chosen = Path(sysconfig.get_config_var("BINDIR")) / "python3"
    assert interpreter.rank_python(package, {interpreter.VARIABLE: str(chosen)}) == chosen


def test_a_variable_that_points_nowhere_is_named(package: Path) -> None:
    with pytest.raises(RankPythonError, match="PARALLEL_DIFFUSION_PYTHON is set to '/no/python', which does not exist"):
        interpreter.rank_python(package, {interpreter.VARIABLE: "/no/python"})
    with pytest.raises(RankPythonError, match="PARALLEL_DIFFUSION_PYTHON .* is not executable"):
        interpreter.rank_python(package, {interpreter.VARIABLE: str(package / "requirements-ranks.txt")})


def test_a_python_with_everything_passes_and_is_asked_once(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_host(tmp_path / "host", FITTING)
    interpreter.check_rank_python(python, package)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("asked twice"))
    interpreter.check_rank_python(python, package)


def test_missing_and_old_packages_are_listed_with_what_to_do(tmp_path: Path, package: Path) -> None:
    python = make_host(tmp_path / "host", {**FITTING, "diffusers": "0.35.0", "accelerate": ""})
    with pytest.raises(RankPythonError) as caught:
        interpreter.check_rank_python(python, package)
    text = str(caught.value)
    assert "diffusers is 0.35.0 (diffusers<0.44,>=0.42.1 needed)" in text
    assert "accelerate is missing" in text
    assert "transformers" not in text
    assert str(python) in text and "`python install.py`" in text and interpreter.VARIABLE in text


def test_a_failed_check_is_repeated(tmp_path: Path, package: Path) -> None:
    python = make_host(tmp_path / "host", {**FITTING, "accelerate": ""})
    with pytest.raises(RankPythonError, match="accelerate is missing"):
        interpreter.check_rank_python(python, package)
    shutil.rmtree(site_packages(tmp_path / "host") / "torch")
    pretend_installed(tmp_path / "host", {"accelerate": "1.15.0", "torch": ""})
    interpreter.check_rank_python(python, package)


def test_something_that_is_no_python_is_refused(package: Path) -> None:
    with pytest.raises(RankPythonError, match="does not work"):
        interpreter.check_rank_python(Path("/bin/false"), package)


def test_asking_for_the_interpreter_imports_no_torch() -> None:
    code = "import sys, parallel_core.launch.interpreter; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"


def test_requirements_of_comfyuis_environment_name_nothing_that_could_move_it() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = {line.split(">")[0] for line in lines if line and not line.startswith("#")}
    assert names == {"numpy", "safetensors"}
