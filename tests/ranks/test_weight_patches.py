"""Changed weights on real ranks: what every division of the weights makes of a set, what crosses, what comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_core.engine import Engine
from parallel_core.engine.placed import placed
from parallel_core.engine.weight_patches import apply_patches
from parallel_core.errors import UserError
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from parallel_core.weight_patches import NO_PATCHES, PatchSet, WeightPatch
from tests.ranks.matrix import CAN_COMPILE, NO_COMPILER
from tests.ranks.remote_flux import FOUR, TWO, RemoteTransformer, call, ledger, number_of_loads, remote
from tests.tiny_files import unpacked_gguf, write_file
from tests.tiny_flux import build_transformer

CALLS = [call(2, text=5)]


def patches(strength: float = 0.7, seed: int = 0) -> PatchSet:
    """Of every kind: over fused tensors and parts of them, decomposed by rows and by columns, biases, a norm."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    found: list[WeightPatch] = []

    def add(target: str, kind: str, shapes: dict[str, tuple[int, ...]], **rest: object) -> None:
        names = {role: f"{seed}.{len(found)}.{role}" for role in shapes}
        for role, shape in shapes.items():
            tensors[names[role]] = 0.3 * torch.randn(*shape, generator=generator) + (role == "dora_scale")
        found.append(WeightPatch(target=target, kind=kind, strength=strength, tensors=names, **rest))  # type: ignore[arg-type]

    lora = {"up": (64, 4), "down": (4, 64)}
    add("double_blocks.0.img_attn.qkv.weight", "lora", lora, offset=(0, 64, 64), alpha=2.0)
    add("double_blocks.0.img_attn.qkv.weight", "lora", {"up": (192, 4), "down": (4, 64), "dora_scale": (1, 64)})
    add("double_blocks.0.img_attn.qkv.bias", "diff", {"value": (192,)})
    add("single_blocks.0.linear1.weight", "lora", {"up": (448, 4), "down": (4, 64), "dora_scale": (448, 1)})
    add("single_blocks.1.linear2.weight", "lokr", {"w1": (8, 4), "w2_a": (8, 3), "w2_b": (3, 80)}, alpha=2.0)
    add("single_blocks.1.linear2.bias", "diff", {"value": (64,)})
    hada = {f"w{half}_{part}": (256, 4) if part == "a" else (4, 64) for half in (1, 2) for part in "ab"}
    add("double_blocks.1.img_mlp.0.weight", "loha", hada, alpha=4.0)
    add("final_layer.adaLN_modulation.1.weight", "lora", {"up": (128, 4), "down": (4, 64)}, swap=True)
    add("double_blocks.0.img_attn.norm.query_norm.scale", "set", {"value": (16,)})
    add("single_blocks.1.linear2.weight", "diff", {"value": (64, 64)}, offset=(1, 256, 64))
    add("double_blocks.1.txt_mod.lin.weight", "lora", {"up": (384, 4), "down": (4, 64)})
    return PatchSet.of(found, tensors)


PLANS = {
    "one rank": (ParallelPlan(devices=("cpu:0",)), {}),
    "ulysses 2": (ParallelPlan(devices=TWO, ulysses=2), {}),
    "tensor 2": (ParallelPlan(devices=TWO, tensor=2), {}),
    "shared by 2": (ParallelPlan(devices=TWO, ulysses=2, shard_weights=True), {"shards": 2}),
    "shared in host memory": (ParallelPlan(devices=TWO, ring=2, shard_weights=True), {"shards": 2, "offload": True}),
    "ulysses 2 x tensor 2, shared": (
        ParallelPlan(devices=FOUR, ulysses=2, tensor=2, shard_weights=True),
        {"shards": 2},
    ),
}


def run(model: RemoteTransformer, wanted: PatchSet) -> Tensor:
    model.patches = wanted
    return model.evaluate(CALLS, label="forward")[0]


@pytest.fixture(scope="module")
def alone(engine: Engine, tiny_flux: Path) -> dict[str, Tensor]:
    """What one rank makes of the sets."""
    model = remote(engine, tiny_flux, ParallelPlan(devices=("cpu:0",)))
    return {wanted.id: run(model, wanted) for wanted in (NO_PATCHES, patches(), patches(-1.0), patches(seed=1))}


@pytest.mark.parametrize("name", PLANS)
def test_every_division_of_the_weights_makes_the_same_of_a_set(
    engine: Engine, tiny_flux: Path, alone: dict[str, Tensor], name: str
) -> None:
    """Added, changed in strength, removed, exchanged, added again: what comes back is bit-equal, nothing is read."""
    plan, changed = PLANS[name]
    model = remote(engine, tiny_flux, plan, **changed)
    before = run(model, NO_PATCHES)
    loads = number_of_loads(engine, model)
    found = [run(model, wanted) for wanted in (patches(), patches(-1.0), NO_PATCHES, patches(seed=1), patches())]
    for output, wanted in zip(found, (patches(), patches(-1.0), NO_PATCHES, patches(seed=1), patches()), strict=True):
        want = alone[wanted.id]
        assert (output - want).abs().max() <= 5e-6 * want.abs().max(), wanted.id
    assert (alone[patches().id] - alone[""]).abs().max() > 0.1 * alone[""].abs().max()
    assert torch.equal(found[2], before)
    assert torch.equal(found[4], found[0])
    assert number_of_loads(engine, model) == loads


def test_another_strength_sends_no_tensor_again(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2), fingerprint="sent")
    sent = []
    for wanted in (patches(), patches(0.1), NO_PATCHES, patches(seed=1), patches(), patches(seed=1)):
        with engine.using(model.spec) as group:
            sent.append(apply_patches(engine, group, model.spec, wanted))
    sizes = [sum(tensor.nbytes for tensor in wanted.tensors.values()) for wanted in (patches(), patches(seed=1))]
    assert sent == [sizes[0], 0, 0, sizes[1], 0, 0]


@pytest.mark.parametrize("name", ["ulysses 2", "tensor 2", "shared by 2"])
def test_a_parked_model_keeps_its_patches(engine: Engine, tiny_flux: Path, name: str) -> None:
    plan, changed = PLANS[name]
    model = remote(engine, tiny_flux, plan, **changed)
    plain, patched = run(model, NO_PATCHES), run(model, patches())
    engine.park(model.spec)
    assert torch.equal(run(model, patches()), patched)
    engine.park(model.spec)
    assert torch.equal(run(model, NO_PATCHES), plain)


def test_after_a_death_and_after_a_release_the_set_is_applied_anew(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, tensor=2))
    patched = run(model, patches())
    engine.group(model.spec.group).links[1].process.kill()
    engine.group(model.spec.group).links[1].process.wait()
    assert torch.equal(run(model, patches()), patched)
    with engine.using(model.spec) as group:
        engine.discard(group, model.spec)
    assert torch.equal(run(model, patches()), patched)


def test_a_model_made_of_a_patched_ones_parts_has_no_patches(engine: Engine, tiny_flux: Path) -> None:
    whole = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2), fingerprint="divided")
    plain, patched = run(whole, NO_PATCHES), run(whole, patches())
    loads = number_of_loads(engine, whole)
    sliced = remote(engine, tiny_flux, ParallelPlan(devices=TWO, tensor=2), fingerprint="divided")
    assert (run(sliced, NO_PATCHES) - plain).abs().max() <= 2e-6 * plain.abs().max()
    assert number_of_loads(engine, sliced) == loads, "made of the parts"
    assert torch.equal(run(whole, patches()), patched)
    assert torch.equal(run(whole, NO_PATCHES), plain)


def test_the_ledger_counts_what_is_kept_of_changed_weights(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2), fingerprint="ledger")

    def host_bytes() -> int:
        return ledger(engine, model)[0][model.spec.key]["host_bytes"]

    run(model, NO_PATCHES)
    assert host_bytes() == 0
    wanted = patches()
    run(model, wanted)
    factors = sum(tensor.nbytes for tensor in wanted.tensors.values())
    assert host_bytes() > factors + 300_000
    run(model, NO_PATCHES)
    assert host_bytes() == factors


# ----- layers placed over devices, host memory and files -----


def placed_remote(engine: Engine, folder: Path, max_memory: str, **changed: object) -> RemoteTransformer:
    plan = ParallelPlan(devices=TWO, strategy="device_map", max_memory=max_memory)
    model = remote(engine, folder, plan, **changed)
    return replace(model, spec=placed(model.spec, plan, [8 * 1000**3] * 2))


@pytest.mark.parametrize("max_memory", ["", "0:900KB,1:200KB,cpu:3MB"])
def test_placed_layers_take_patches_wherever_they_lie(
    engine: Engine, tiny_flux: Path, alone: dict[str, Tensor], max_memory: str
) -> None:
    model = placed_remote(engine, tiny_flux, max_memory)
    before = run(model, NO_PATCHES)
    assert (" on cpu" in model.statistics.placement.replace("on cpu:", "")) == bool(max_memory)
    for wanted in (patches(), patches(-1.0)):
        want = alone[wanted.id]
        assert (run(model, wanted) - want).abs().max() <= 5e-6 * want.abs().max()
    engine.park(model.spec)
    assert torch.equal(run(model, NO_PATCHES), before)


def test_a_weight_that_is_left_in_the_files_is_not_changed(engine: Engine, tiny_flux: Path) -> None:
    model = placed_remote(engine, tiny_flux, "0:900KB,1:200KB,cpu:0B,disk:3MB")
    before = run(model, NO_PATCHES)
    loads = number_of_loads(engine, model)
    with pytest.raises(UserError, match=r"The LoRA changes '.*', which max_memory leaves in the model's files"):
        run(model, patches())
    assert torch.equal(run(model, NO_PATCHES), before)
    assert number_of_loads(engine, model) == loads


# ----- packed weights -----

FP8 = {"storage": "float8_e4m3fn", "fingerprint": "packed"}


@pytest.fixture(scope="module")
def rounded_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers in plain float32: the blocks' matrices are rounded to fp8."""
    model = build_transformer()
    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        for module in blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.to(torch.float8_e4m3fn).float()
    folder = tmp_path_factory.mktemp("models") / "rounded"
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*PLANS, "device_map", "device_map, in files"])
def test_packed_weights_are_patched_as_plain_ones_are(
    engine: Engine, tiny_flux: Path, rounded_flux: Path, name: str
) -> None:
    """On one rank bit for bit; packed bytes never change, so even those that are left in the files can be patched."""
    if name.startswith("device_map"):
        limits = "0:400KB,1:50KB,cpu:0B,disk:3MB" if "files" in name else ""
        model = placed_remote(engine, tiny_flux, limits, **FP8)
    else:
        plan, changed = PLANS[name]
        model = remote(engine, tiny_flux, plan, **changed, **FP8)
    plain = remote(engine, rounded_flux, ParallelPlan(devices=("cpu:0",)))
    only_matrices = lambda wanted: PatchSet.of(  # noqa: E731
        [patch for patch in wanted.patches if patch.target.endswith("linear1.weight")], wanted.tensors
    )
    choose = only_matrices if "files" in name else (lambda wanted: wanted)
    before = run(model, NO_PATCHES)
    assert ("on disk" in model.statistics.placement) == ("files" in name)
    for wanted in map(choose, (patches(), patches(-1.0), patches(seed=1))):
        want = run(plain, wanted)
        output = run(model, wanted)
        assert (output - want).abs().max() <= 5e-6 * want.abs().max()
        assert torch.equal(output, want) or name != "one rank"
    engine.park(model.spec)
    assert torch.equal(run(model, wanted), output)
    assert torch.equal(run(model, NO_PATCHES), before)


@pytest.mark.full
@pytest.mark.skipif(not CAN_COMPILE, reason=NO_COMPILER)
@pytest.mark.parametrize("held", [{}, FP8], ids=["plain", "packed"])
def test_compiled_blocks_follow_their_patches(
    engine: Engine, tiny_flux: Path, rounded_flux: Path, held: dict[str, str]
) -> None:
    compiled = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2, compile="default"), **held)
    plain = remote(engine, rounded_flux if held else tiny_flux, ParallelPlan(devices=("cpu:0",)))
    for wanted in (NO_PATCHES, patches(), patches(0.2), NO_PATCHES, patches(seed=1)):
        want = run(plain, wanted)
        assert (run(compiled, wanted) - want).abs().max() <= 5e-6 * want.abs().max()


@pytest.fixture(scope="module")
def gguf_flux(tiny_flux: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model as GGUF, and a file with the numbers that it stands for."""
    folder = tmp_path_factory.mktemp("files")
    packed = write_file(folder / "packed.gguf", tiny_flux, FAMILY, "gguf")
    save_file(unpacked_gguf(packed), folder / "unpacked.safetensors")
    return packed, folder / "unpacked.safetensors"


@pytest.mark.parametrize("name", ["one rank", "tensor 2", "shared by 2"])
def test_gguf_weights_are_patched_as_plain_ones_are(
    engine: Engine, tiny_flux: Path, gguf_flux: tuple[Path, Path], name: str
) -> None:
    packed, unpacked = gguf_flux
    plan, changed = PLANS[name]
    config = {"config_from": str(tiny_flux)}
    model = remote(engine, packed, plan, **changed, **config, storage="as_stored", fingerprint="gguf")
    plain = remote(engine, unpacked, ParallelPlan(devices=("cpu:0",)), **config, fingerprint="unpacked")
    before = run(model, NO_PATCHES)
    for wanted in (patches(), patches(seed=1)):
        want = run(plain, wanted)
        assert (run(model, wanted) - want).abs().max() <= 5e-6 * want.abs().max()
    assert torch.equal(run(model, NO_PATCHES), before)
