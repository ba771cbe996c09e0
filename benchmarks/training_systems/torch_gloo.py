"""torch.distributed, gloo: what DistributedDataParallel does with one bucket, a process per replica."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import training_systems as systems


def work(rank: int, parameters: int, steps: int, store: str) -> None:
    """Be one process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=systems.REPLICAS)
    weights = torch.zeros(parameters)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            gradient = weights - systems.target(step, rank)
            gradient *= systems.RATE
            dist.all_reduce(gradient)
            weights.sub_(gradient)

    train(0, systems.WARM_STEPS)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    train(systems.WARM_STEPS, systems.WARM_STEPS + steps)
    dist.barrier()
    wall_s = time.perf_counter() - began
    cpu_s = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(cpu_s)
    if rank == 0:
        systems.tell(systems.Steps(wall_s, float(cpu_s[0]), float(weights[-1])))
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    import torch.multiprocessing as processes

    parameters, steps = systems.options()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes.spawn(work, (parameters, steps, store), nprocs=systems.REPLICAS)


if __name__ == "__main__":
    main()
