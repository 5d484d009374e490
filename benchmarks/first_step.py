"""How long a user waits: the first step on ranks that have to start and load, and on ranks that are warm.

`python -m benchmarks.first_step`. Times from the prompt to the end of its first step, for cpu:1 and cpu:2.
"""

from __future__ import annotations

import time

from benchmarks import setup
from benchmarks.overhead import build, sampler


def main() -> None:
    """Runs all of it."""
    with setup.bench("bench", **setup.COMPUTE_BOUND):
        runtime = setup.load_package("nodes.runtime")
        plans = setup.load_package("parallel_core.plan")
        for num_ranks in (1, 2):
            plan = plans.ParallelPlan(devices=tuple(f"cpu:{rank}" for rank in range(num_ranks)), ulysses=num_ranks)
            model = build(plan, "bench")
            run = sampler(model)
            for state in ("cold (ranks start, weights are read)", "warm"):
                started = time.perf_counter()
                run()
                total = time.perf_counter() - started
                statistics = model.model.parallel_diffusion.statistics
                step = statistics.seconds / statistics.num_steps
                first = total - step * (statistics.num_steps - 1)
                setup.say(f"{plan.describe()}, {state}: first step after {first:.2f} s, of which {step:.2f} s the step")
            runtime.engine().shutdown()


if __name__ == "__main__":
    main()
