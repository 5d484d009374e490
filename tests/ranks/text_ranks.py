"""What the ranks of `test_encode_tensor` run: encoders in slices, beside the same encoders whole."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.text_files import open_place
from parallel_core.text_source import TextSource
from parallel_core.text_spec import TextPlace
from parallel_core.worker.meshes import MeshCache
from parallel_core.worker.prompts import encode_prompt
from parallel_core.worker.shared_weights import own_part
from parallel_core.worker.store import ModelStore, StoredModel, give_memory_back
from parallel_core.worker.text_loading import TextEncoders, load_text_encoders, load_text_slices
from tests.ranks.transformer_ranks import anonymous_peak

CPU = torch.device("cpu")


def source_of(place: dict[str, Any]) -> TextSource:
    return open_place(TextPlace(**{**place, "files": tuple(place.get("files", ()))}), TEXT_FAMILIES)


def load_whole(place: dict[str, Any], dtype: torch.dtype | None = None) -> TextEncoders:
    loaded = load_text_encoders(
        source_of(place), devices=("cpu:0",), placement="single", limits={}, offload=Path.cwd() / "never"
    )
    if dtype is not None:
        for encoder in loaded.encoders.values():
            encoder.to(dtype)
    return loaded


def outputs_of(loaded: TextEncoders, prompt: str, length: int) -> dict[str, torch.Tensor]:
    return dict(encode_prompt(loaded.family, loaded.tokenizers, loaded.encoders, prompt, length).outputs)


def held_bytes(loaded: TextEncoders) -> int:
    stored = StoredModel(module=torch.nn.ModuleDict(loaded.encoders), device=CPU, close=loaded.close)
    return stored.num_bytes


def compare(rank: int, world_size: int, place: dict[str, Any], prompts: list[str], length: int) -> dict[str, Any]:
    """Per prompt and key: the slices' largest difference and one process's own distance from float32, both as parts of
    the largest value; bytes of this rank and of one process."""
    sliced = load_text_slices(source_of(place), MeshCache("cpu").everyone(), CPU)
    alone, exact = load_whole(place), load_whole(place, torch.float32)
    errors = []
    for prompt in prompts:
        ours, theirs = outputs_of(sliced, prompt, length), outputs_of(alone, prompt, length)
        truth = outputs_of(exact, prompt, length)
        for key, reference in theirs.items():
            scale = float(truth[key].abs().max())
            rounding = (reference.float() - truth[key]).abs().max()
            error = (ours[key].float() - truth[key]).abs().max()
            errors.append([float(error) / scale, float(rounding) / scale])
    return {
        "errors": errors,
        "bytes": held_bytes(sliced),
        "whole": held_bytes(alone),
        "sum": float(sum(tensor.double().sum() for tensor in ours.values())),
        "tensors": {name: encoder.dtype == alone.encoders[name].dtype for name, encoder in sliced.encoders.items()},
    }


def without_exchange(rank: int, world_size: int, place: dict[str, Any], prompt: str) -> float:
    """How far the result is off when no sums are taken over the ranks."""
    from transformers.distributed import tensor_parallel

    sliced = load_text_slices(source_of(place), MeshCache("cpu").everyone(), CPU)
    alone = outputs_of(load_whole(place), prompt, 32)["cross_attn"]
    real, tensor_parallel.dist = tensor_parallel.dist, _Silent()  # type: ignore[assignment]
    try:
        ours = outputs_of(sliced, prompt, 32)["cross_attn"]
    finally:
        tensor_parallel.dist = real
    return float((ours - alone).norm() / alone.norm())


class _Silent:
    """torch.distributed in which every all-reduce leaves what it is given."""

    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        pass


def memory(rank: int, world_size: int, place: dict[str, Any], warm: dict[str, Any]) -> dict[str, int]:
    """Growth of this rank's anonymous memory: its peak while loading, what stays, what stays after closing."""
    mesh = MeshCache("cpu").everyone()
    loaded = load_text_slices(source_of(warm), mesh, CPU)  # what libraries keep after their first use
    outputs_of(loaded, "one", 16)
    loaded.close()
    del loaded
    before = resident()
    with anonymous_peak() as growth:
        loaded = load_text_slices(source_of(place), mesh, CPU)
    size = held_bytes(loaded)
    outputs_of(loaded, "one", 16)
    loaded.close()
    del loaded
    gc.collect()
    give_memory_back()
    return {"peak": growth[0], "held": size, "left": resident() - before}


def resident() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def park_and_return(rank: int, world_size: int, place: dict[str, Any], device: str) -> dict[str, Any]:
    """Moves slices to host memory and back in the store: where they lie meanwhile, and whether the values stay."""
    home = torch.device(device)
    loaded = load_text_slices(source_of(place), MeshCache(home.type).everyone(), home)
    before = outputs_of(loaded, "seven dogs", 32)
    store = ModelStore()
    model = StoredModel(module=torch.nn.ModuleDict(loaded.encoders), device=home, close=loaded.close)
    store.add("text", model)
    places = []
    for act in (store.park, store.use):
        act("text")
        places.append(sorted({own_part(parameter).device.type for parameter in model.module.parameters()}))
    after = outputs_of(loaded, "seven dogs", 32)
    return {"places": places, "same": all(torch.equal(after[key], before[key]) for key in before)}
