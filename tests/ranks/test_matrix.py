"""Every model in every mode with every input: N ranks compute what one rank computes, or the mode is refused.

`make quick` takes a few modes with one model of each family, `make test` every mode with these and the few modes with
every other model, `make full` the rest.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.ranks.gloo import run_on_ranks
from tests.ranks.matrix import MODELS, MODES, PLACED, degrees_of, num_processes, refusal, rows, sharing_of

_SAMPLE = ("ulysses 3", "ring 3", "ring 2 x ulysses 2", "tensor 3", "ring 2 x tensor 2")
_LARGE = "ring 2 x ulysses 2 x tensor 2"


def _marked(*, exchanging: bool = False) -> list[Any]:
    params = []
    for model, mode in rows():
        if exchanging and MODES[mode] == PLACED:
            continue  # one process, which exchanges nothing
        is_first = model == MODELS[model].name
        chosen = mode != _LARGE if is_first else mode in _SAMPLE
        quick = is_first and mode in _SAMPLE
        marks = () if quick else (pytest.mark.slow,) if chosen else (pytest.mark.full,)
        params.append(pytest.param(model, mode, id=f"{model}-{mode}", marks=marks))
    return params


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model folder per model, written by one rank so that the tests' own process need not build any."""
    root = tmp_path_factory.mktemp("matrix")
    found = {name: str(root / name) for name in MODELS}
    for name, model in MODELS.items():
        run_on_ranks(1, "transformer_ranks:write_models", name=model.name, models={found[name]: model.config})
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "mode"), _marked())
def test_ranks_compute_what_one_rank_computes(folders: dict[str, str], model: str, mode: str, dtype: str) -> None:
    """float32: 1e-6. bfloat16: the same bits where only tokens and heads move; else no farther from one rank than one
    rank is from float32, over all inputs together: over a single small one chance decides."""
    if reason := refusal(MODELS[model], mode):
        assert "nearest degree that works" in reason
        return
    inputs = MODELS[model].inputs
    settings = {
        "name": MODELS[model].name,
        "folder": folders[model],
        "mode": degrees_of(mode),
        "dtype": dtype,
        **sharing_of(mode),
    }
    ranks = run_on_ranks(
        num_processes(mode), "transformer_ranks:compare", timeout=280, cases=[*inputs.values()], **settings
    )
    keeps_bits = not {"tensor", "ring"} & degrees_of(mode).keys()
    for rank, results in enumerate(ranks):
        for case, (error, is_equal, rounding) in zip(inputs, results, strict=True):
            where = f"{model}, {mode}, {dtype}, {case}, rank {rank}: {error:.1e} (one rank: {rounding:.1e})"
            if dtype == "float32":
                assert error <= 1e-6, where
            elif keeps_bits:
                assert is_equal, where
        if dtype == "bfloat16":
            errors, _, roundings = zip(*results, strict=True)
            assert math.hypot(*errors) <= math.hypot(*roundings), f"{model}, {mode}, rank {rank}"


@pytest.mark.parametrize(("model", "mode"), _marked(exchanging=True))
def test_the_check_notices_a_missing_exchange(folders: dict[str, str], model: str, mode: str) -> None:
    """The negative control: with the exchange switched off every cell is wrong."""
    if refusal(MODELS[model], mode):
        return
    inputs = MODELS[model].inputs
    settings = {"name": MODELS[model].name, "folder": folders[model], "mode": degrees_of(mode), **sharing_of(mode)}
    ranks = run_on_ranks(
        num_processes(mode), "transformer_ranks:without_exchange", cases=[*inputs.values()], **settings
    )
    for number, case in enumerate(inputs):
        assert max(errors[number] for errors in ranks) > 1e-4, f"{model}, {mode}, {case}"
