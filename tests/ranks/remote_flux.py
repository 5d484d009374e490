"""A tiny Flux behind the engine: what goes in, what must come out, and what the ranks say they hold.

Does not know: which plans or failures are tested with it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from parallel_core.engine import Engine
from parallel_core.engine.models import TransformerSpec
from parallel_core.engine.transformer import RemoteTransformer
from parallel_core.families.base import SeamCall
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from parallel_core.protocol import Status
from tests.tiny_flux import TINY, build_transformer

TWO = ("cpu:0", "cpu:1")
FOUR = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
CONFIG = FAMILY.full_config(TINY)


def remote(engine: Engine, folder: Path, plan: ParallelPlan, **changed: object) -> RemoteTransformer:
    parts = dict(fingerprint="1", family="flux", name="tiny", dtype="float32", num_bytes=2_000_000, tensor=plan.tensor)
    spec = TransformerSpec(devices=plan.devices, folder=str(folder), **{**parts, **changed})
    return RemoteTransformer(engine=engine, spec=spec, plan=plan, family=FAMILY, config=CONFIG)


def call(rows: int, text: int, image: tuple[int, int] = (5, 3), seed: int = 0) -> SeamCall:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    height, width = image
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(height)), torch.arange(float(width)))
    return SeamCall(
        rows={
            "img": random(rows, height * width, 64),
            "txt": random(rows, text, 32),
            "y": random(rows, 16),
            "timesteps": torch.full((rows,), 0.7),
            "guidance": torch.full((rows,), 3.5),
        },
        shared={"img_ids": ids, "txt_ids": torch.zeros(text, 3)},
    )


def expected(calls: list[SeamCall]) -> list[torch.Tensor]:
    """What diffusers computes in this process, one row after the other."""
    model = build_transformer()
    assert FAMILY.on_loaded is not None
    FAMILY.on_loaded(model)
    with torch.no_grad():
        return [
            torch.cat(
                [
                    FAMILY.finish(model(**FAMILY.prepare({k: v[r : r + 1] for k, v in c.rows.items()}, c.shared)))
                    for r in range(c.num_rows)
                ]
            )
            for c in calls
        ]


def assert_close(outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        assert (output - want).abs().max() <= 2e-6 * want.abs().max()


def number_of_loads(engine: Engine, model: RemoteTransformer) -> list[int]:
    group = engine.group(model.spec.group)
    return [int(reply.data["num_loads"]) for reply in engine.request_group(group, Status())]


def ledger(engine: Engine, model: RemoteTransformer) -> list[dict[str, dict[str, int]]]:
    group = engine.group(model.spec.group)
    return [reply.data["models"] for reply in engine.request_group(group, Status())]


def holds(engine: Engine, model: RemoteTransformer) -> bool:
    """Whether every rank has the model; releases that are due are carried out first."""
    engine.group(model.spec.group)
    return all(model.spec.key in rank for rank in ledger(engine, model))
