"""What ranks of one host send each other through shared memory. For test_hostmem.py, which starts one for each rank.

hostmem.py RANK SIZE FOLDER: rank 0 writes what it saw to FOLDER/found.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread, Timer
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from spcompile.ops import hostmem, wire


def exchanged(rank: int, size: int, number: int, dtype: torch.dtype = torch.float32, width: int = 1000) -> bool:
    """One of each exchange; is what arrived what the others sent?"""

    def sent(r: int) -> Tensor:
        return torch.arange(size * width).view(size, width).to(dtype) + r + 7 * number

    def program() -> Any:
        gather = wire.AllGather(sent(rank))
        yield gather
        gathered = yield wire.Wait(gather)
        swapped = yield wire.AllToAll(sent(rank))
        shift = wire.Shift(sent(rank), None)
        yield shift
        shifted = yield wire.Wait(shift)
        total = yield wire.AllReduce(sent(rank))
        return gathered, swapped, shifted, total

    gathered, swapped, shifted, total = wire.over_group(program(), dist.group.WORLD.group_name, [1, size, 1])
    whole = torch.stack([sent(r) for r in range(size)])
    moved = torch.equal(gathered, whole) and torch.equal(swapped, whole[:, rank])
    return moved and torch.equal(shifted, whole[rank - 1]) and torch.equal(total, whole.sum(0, dtype=dtype))


def several_on_their_way(rank: int, size: int) -> bool:
    """The second and third start before the first is taken: they go through gloo."""

    def program() -> Any:
        gathers = [wire.AllGather(torch.full((5,), 10.0 * i + rank)) for i in range(3)]
        for g in gathers:
            yield g
        received = []
        for g in gathers:
            received.append((yield wire.Wait(g)))
        return received

    got = wire.over_group(program(), dist.group.WORLD.group_name, [1, size, 1])
    return all(torch.equal(g[:, 0], 10.0 * i + torch.arange(size)) for i, g in enumerate(got))


def raised(call: Any) -> str:
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return f"{error} [{time.monotonic() - start:.0f} s]"
    return ""


@contextlib.contextmanager
def group(
    rank: int, size: int, folder: Path, timeout_s: float = 60, refused: str = ""
) -> Iterator[hostmem.HostMemory | None]:
    store = folder / f"store{len(list(folder.glob(f'{rank}.began*')))}"
    (folder / f"{rank}.began{store.name}").touch()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    with mock.patch(f"os.{refused}", side_effect=PermissionError) if refused else contextlib.nullcontext():
        memory = hostmem.of(dist.group.WORLD)
    yield memory
    dist.destroy_process_group()


def interrupted_as_it_came(memory: hostmem.HostMemory) -> bool:
    """Does a wait count as ended that went on with what it waited for?"""
    counter = [0]
    with mock.patch.object(hostmem, "_LOOK_S", math.inf):
        waits = Thread(target=memory.wait, args=(1, counter, 1, 0))
        waits.start()
        while not memory.waiting:
            time.sleep(0.01)
        Timer(0.2, counter.__setitem__, (0, 1)).start()
        return memory.interrupt()


def interrupted_before_it_was_put(memory: hostmem.HostMemory) -> tuple[str, int]:
    """The error, and by how many the number of messages is off after it."""
    before = memory.number
    with mock.patch.object(memory, "taken", [[before - 2]] * len(memory.pids)):
        Timer(0.2, memory.interrupt).start()
        return raised(lambda: memory.put([torch.zeros(4)])), memory.number - before


class SlowToLeave(hostmem.HostMemory):
    """What is done after a wait comes late: another thread sees what lies in between."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if (name, value) == ("waiting", 0):
            time.sleep(0.5)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with group(rank, size, folder) as memory:
        found["shared"] = memory is not None
        found["exact"] = [exchanged(rank, size, i) for i in range(20)]
        found["dtypes"] = [
            exchanged(rank, size, 1, t) for t in (torch.float64, torch.int64, torch.complex64, torch.int8)
        ]
        found["messages"] = memory.number
        with torch.inference_mode():
            found["in inference mode"] = exchanged(rank, size, 2)
        found["nothing"] = exchanged(rank, size, 2, width=0)
        before = memory.number
        found["several"] = several_on_their_way(rank, size)
        with mock.patch.object(hostmem, "SLOT", 100):
            found["too large"] = exchanged(rank, size, 3)
        found["more messages"] = memory.number - before
    for refused in ("open", "memfd_create"):
        with group(rank, size, folder, refused="" if rank else refused) as memory:
            found[f"shared without {refused}"] = memory is not None
            found[f"exact without {refused}"] = exchanged(rank, size, 4)
    # the segments are made inside, and written outside of it
    with torch.inference_mode(), group(rank, size, folder) as memory, torch.inference_mode(False):
        found["made in inference mode"] = exchanged(rank, size, 4)
    with group(rank, size, folder) as memory:
        if rank == 0:
            found["interrupted as it came"] = interrupted_as_it_came(memory)
            found["interrupted before it was put"] = interrupted_before_it_was_put(memory)
            seen: list[int] = []

            def interrupt() -> None:
                while not memory.interrupt():
                    time.sleep(0.01)
                seen.append(int(memory.sent[rank][0]))

            memory.__class__ = SlowToLeave
            thread = Timer(1.0, interrupt)
            thread.start()
            found["interrupted"] = raised(lambda: exchanged(rank, size, 7))
            thread.join()
            memory.__class__ = hostmem.HostMemory
            found["sent when interrupted"] = seen
        dist.barrier()
        exact = exchanged(rank, size, 8)
        found["exact after it"] = exact and memory.number == 4
    with group(rank, size, folder, timeout_s=3):
        if rank == 0:
            found["one is late"] = raised(lambda: exchanged(rank, size, 5))
        else:
            time.sleep(6)
    with group(rank, size, folder):
        if rank:
            os._exit(0)
        found["one is gone"] = raised(lambda: exchanged(rank, size, 6))
        (folder / "found.json").write_text(json.dumps(found))
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
