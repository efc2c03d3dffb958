"""Ends of a run, one after the other in the same processes: each makes the group, runs steps from graphs and ends.

``teardown.py FOLDER NAME...``: `main` of cases.py makes one group for all cases; here every case has its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from helpers import C, SelfAttention, tokens

import spcompile
from spcompile.testing import record_on_cpu

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEGREES = {"ring": 2, "ulysses": 2} if SIZE == 4 else {"ulysses": 2}

KEPT: list[Any] = []


def started(folder: Path, name: str) -> tuple[Any, spcompile.Backend]:
    """A model that has run from graphs, in a group of this case's own."""
    torch._dynamo.reset()
    store = dist.FileStore(str(folder / f"{name}.store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    backend = spcompile.backend(**DEGREES, inner="eager", cudagraphs="piecewise")
    engine = record_on_cpu(backend)
    torch.manual_seed(0)
    model = SelfAttention().eval().requires_grad_(False).double()
    compiled, x = torch.compile(model, backend=backend), tokens(9).double()
    for _ in range(3):
        assert torch.allclose(compiled(x), model(x), atol=1e-9)
    assert engine.num_replays
    return compiled, backend


def run(folder: Path, name: str) -> dict[str, Any]:
    compiled, backend = started(folder, name)
    raised = ""
    if name == "in_order":
        backend.close()
        dist.destroy_process_group()
    elif name == "out_of_order":
        dist.destroy_process_group()
        backend.close()
    elif name == "twice":
        backend.close()
        backend.close()
        dist.destroy_process_group()
        backend.close()
    elif name == "context_manager":
        with backend:
            compiled(torch.ones(2, 9, C).double())
        dist.destroy_process_group()
    elif name == "dropped":
        del compiled, backend
        torch._dynamo.reset()
        gc.collect()
        dist.destroy_process_group()
    else:
        assert name in ("exit_without_close", "exit_without_anything")
        if name == "exit_without_close":
            dist.destroy_process_group()
        KEPT.append((compiled, backend))  # until the interpreter takes itself apart
        return {"raised": raised}
    if name != "dropped":
        try:
            compiled(torch.ones(2, 9, C).double())
        except spcompile.SPError as error:
            raised = type(error).__name__
    return {"raised": raised}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        try:
            result = run(folder, name)
        except BaseException:
            result = {"error": traceback.format_exc()}
        (folder / f"{name}.{RANK}.json").write_text(json.dumps(result))
