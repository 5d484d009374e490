"""What the ranks of `test_stored` run: a model from a quantised file, held packed and held unpacked, under one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_core.model_file import ModelSource, read_transformer
from parallel_core.parallelize import apply_plan
from parallel_core.plan import RunMode
from parallel_core.storage import Storage, choose_storage
from parallel_core.worker.loading import WHOLE, Part, load_transformer
from parallel_core.worker.meshes import MeshCache
from parallel_core.worker.packed import PackedLinear
from parallel_core.worker.placed_transformer import place_transformer
from parallel_core.worker.shared_weights import is_shared, let_go
from parallel_core.worker.store import StoredModel
from tests.ranks.transformer_ranks import CASE, distance, make_inputs, parameter_bytes
from tests.tiny_files import write_file
from tests.tiny_models import TINY_MODELS, family_of

CPU = torch.device("cpu")


def write_files(rank: int, world_size: int, name: str, root: str, layouts: list[str]) -> None:
    """`root`/NAME (a transformer folder) and `root`/NAME-LAYOUT for each layout."""
    folder = TINY_MODELS[name].write(Path(root) / name)
    for layout in layouts:
        suffix = ".gguf" if layout == "gguf" else ".safetensors"
        write_file(Path(root) / f"{name}-{layout}{suffix}", folder, family_of(name), layout)


def _source(file: str) -> ModelSource:
    path = Path(file)
    return ModelSource(path) if path.is_dir() else ModelSource(path, _folder_of(path))


def _folder_of(file: Path) -> Path:
    """The folder that a file was made of: the longest name that its own begins with."""
    return max(
        (path for path in file.parent.iterdir() if file.stem.startswith(f"{path.name}-")), key=lambda p: len(p.name)
    )


def packed_layers(model: nn.Module) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def _part(run: RunMode, meshes: MeshCache, sharing: dict[str, bool]) -> Part:
    return Part(
        tensor_rank=meshes.get(run.shape).get_local_rank("tensor"),
        tensor_degree=run.tensor,
        shared_over=meshes.sharing(run.context, run.tensor) if sharing.get("shard_weights") else None,
        offload=sharing.get("offload", False),
    )


@torch.inference_mode()
def compare_held(
    rank: int, world_size: int, name: str, file: str, weight_dtype: str, mode: dict[str, Any], **sharing: bool
) -> dict[str, Any]:
    """The outputs of the packed and the unpacked model under the same plan, and of one rank."""
    source, family, run, meshes = _source(file), family_of(name), RunMode(**mode), MeshCache("cpu")
    held = choose_storage(read_transformer(source)[0], weight_dtype)
    outputs, models = [], []
    for storage in (held, Storage(held.dtype)):
        loaded = load_transformer(source, family, storage, CPU, _part(run, meshes, sharing))
        apply_plan(loaded.model, family, loaded.shards, meshes.get(run.shape), run)
        with torch.no_grad() if is_shared(loaded.model) else torch.inference_mode():
            outputs.append(loaded.model(**make_inputs(name, loaded.model, CASE, held.dtype))[0])
        let_go(loaded.model)
        models.append(loaded.model)
    alone = load_transformer(source, family, held, CPU, WHOLE).model
    return {
        "equal": torch.equal(*outputs),
        "distance": distance(outputs[0], alone(**make_inputs(name, alone, CASE, held.dtype))[0]),
        "packed": [packed_layers(model) for model in models],
    }


@torch.inference_mode()
def compare_placed(rank: int, world_size: int, name: str, file: str, shares: dict[str, float]) -> dict[str, Any]:
    """The same for layers that lie on two "devices", in host memory and in the file."""
    source, family = _source(file), family_of(name)
    held = choose_storage(read_transformer(source)[0], "default")
    alone = load_transformer(source, family, held, CPU).model
    size = parameter_bytes(alone) + sum(buffer.nbytes for buffer in alone.buffers())
    limits = {home: int(share * size) for home, share in shares.items()}
    placed = place_transformer(source, family, held, ("cpu:0", "cpu:1"), limits)
    outputs = [model(**make_inputs(name, model, CASE, held.dtype))[0] for model in (alone, placed.model)]
    return {"equal": torch.equal(*outputs), "homes": sorted(placed.plan.bytes_per_device)}


@torch.inference_mode()
def hold_and_park(rank: int, world_size: int, name: str, file: str, weight_dtype: str) -> dict[str, Any]:
    """Bytes of a model held packed and unpacked, and whether its bits survive the way to host memory and back."""
    from parallel_core.worker.store import ModelStore

    source, family = _source(file), family_of(name)
    held = choose_storage(read_transformer(source)[0], weight_dtype)
    whole = load_transformer(source, family, Storage(held.dtype), CPU).model
    model = load_transformer(source, family, held, CPU).model
    inputs = make_inputs(name, model, CASE, held.dtype)
    before = model(**inputs)[0]
    store = ModelStore()
    stored = StoredModel(module=model, device=CPU, close=lambda: None)
    store.add("key", stored)
    store.park("key")
    after = store.use("key").module(**inputs)[0]
    return {
        "bytes": stored.num_bytes,
        "unpacked_bytes": parameter_bytes(whole),
        "same": torch.equal(before, after),
        "distance": distance(before, whole(**inputs)[0]),
    }
