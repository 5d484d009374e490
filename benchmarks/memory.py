"""Where a 1 GB model's bytes are: in ComfyUI's process, and in each rank of tensor 2.

`python -m benchmarks.memory`. Anonymous resident memory (proc(5), RssAnon) before and after loading, and each rank's
parameters as a part of the whole.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import setup
from benchmarks.overhead import build

# One block of each kind at FLUX.1's width: 0.53 billion weights, 1.06 GB in bfloat16.
ONE_BLOCK_EACH = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}


def resident_megabytes(pid: int | str = "self") -> float:
    """RssAnon of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError("no RssAnon in /proc")


def main() -> None:
    """Runs all of it."""
    import torch

    with setup.bench("large", torch.bfloat16, **ONE_BLOCK_EACH):
        runtime = setup.load_package("nodes.runtime")
        plans = setup.load_package("parallel_core.plan")
        devices = ("cpu:0", "cpu:1")
        for plan in (plans.ParallelPlan(devices=devices, ulysses=2), plans.ParallelPlan(devices=devices, tensor=2)):
            before = resident_megabytes()
            model = build(plan, "large")
            remote = model.model.parallel_diffusion
            remote.ensure_loaded()
            grown = resident_megabytes() - before
            whole = remote.spec.num_bytes
            setup.say(f"{plan.describe()}: {whole / 1e6:.0f} MB of weights; this process grew by {grown:.0f} MB")
            for rank in runtime.engine().status()[0]["ranks"]:
                held = sum(entry["device_bytes"] for entry in rank["models"].values())
                resident = rank["memory"]["now"] / 1e6
                setup.say(f"  rank {rank['rank']}: {held / whole:.3f} of the weights, {resident:.0f} MB resident")
            del model, remote
            runtime.engine().shutdown()


if __name__ == "__main__":
    main()
