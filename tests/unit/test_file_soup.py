"""Whatever values a header or a config has: the file is read, or refused by one clear error."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from parallel_core.errors import UserError
from parallel_core.model_file import ModelSource, read_transformer
from parallel_core.storage import choose_storage
from tests.tiny_files import write_file
from tests.tiny_models import TINY_MODELS, family_of
from tests.unit.file_soup import changed_header, read_parts

SMALL: dict[str, dict[str, Any]] = {
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "qwen": {"num_layers": 1},
    "wan-i2v": {"num_layers": 1},
}
"""As few names as a model can have, so that a changed byte hits each of them often."""

FILES = [(name, layout) for name in SMALL for layout in ("original", "old-scaled", "new-scaled")]
FILES += [("flux", "metadata-scaled"), ("flux", "prefixed"), ("flux", "diffusers")]
TRIES = 150


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ModelSource]:
    """A sound file and the folder of its config."""
    root = tmp_path_factory.mktemp("sound")

    def make(name: str, layout: str) -> ModelSource:
        folder = root / name
        if not folder.exists():
            TINY_MODELS[name].write(folder, **SMALL[name])
        file = root / f"{name}-{layout}.safetensors"
        return ModelSource(write_file(file, folder, family_of(name), layout), folder)

    return make


def survives(source: ModelSource) -> bool:
    """Whether the file is read; anything but `UserError` comes out of here."""
    started = time.monotonic()
    try:
        checkpoint, _ = read_transformer(source)
        choose_storage(checkpoint, "default")
    except UserError as error:
        assert source.path.name in str(error) or str(source.config_from) in str(error), error
        return False
    finally:
        assert time.monotonic() - started < 5
    with safe_open(source.path, framework="pt") as opened:  # so the ranks can open it too
        assert opened.keys()
    return True


@pytest.mark.parametrize(("name", "layout"), FILES)
def test_changed_values(tmp_path: Path, sound: Callable[[str, str], ModelSource], name: str, layout: str) -> None:
    source, rng = sound(name, layout), random.Random(f"{name} {layout}")
    assert survives(source)
    header, data = read_parts(source.path)
    for number in range(TRIES):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(changed_header(header, data, rng))
        survives(ModelSource(file, source.config_from))
        file.unlink()


@pytest.mark.parametrize("name", SMALL)
def test_changed_configs(tmp_path: Path, sound: Callable[[str, str], ModelSource], name: str) -> None:
    """Values of any type in the config of config_from, and of a folder."""
    source, rng = sound(name, "original"), random.Random(name)
    assert source.config_from is not None
    config = json.loads((source.config_from / "config.json").read_text())
    weights = next(source.config_from.glob("*.safetensors"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / weights.name).symlink_to(weights)
    for _ in range(TRIES):
        changed = {**config, rng.choice([*config, ""]): rng.choice([None, 0, -1, 7, 1.5, "x", [], [1, 2], {}, True])}
        (folder / "config.json").write_text(json.dumps(changed))
        for path, config_from in ((source.path, folder), (folder, None)):
            try:
                read_transformer(ModelSource(path, config_from))
            except UserError:
                pass
