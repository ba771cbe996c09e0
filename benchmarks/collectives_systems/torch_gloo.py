"""torch.distributed, gloo: all_reduce in place, a process per replica."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import collectives_systems as systems
from benchmarks.collectives_loop import Size, measure


def work(rank: int, replicas: int, sizes: tuple[Size, ...], store: str) -> None:
    """Be one process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=replicas)

    def make(elements: int, value: float) -> Any:
        return torch.full((elements,), value)

    def reduce(tensor: Any) -> Any:
        if tensor[0]:
            tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    found = measure(sizes, replicas, make, reduce, dist.barrier)
    if rank == 0:
        systems.tell(found)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    import torch.multiprocessing as processes

    replicas, sizes = systems.options()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (replicas, sizes, str(Path(folder) / "store")), nprocs=replicas)


if __name__ == "__main__":
    main()
