"""Runs the examples of docs/refusals.md that need two ranks, one after the other. For test_refusals.py.

torchrun --nproc-per-node 2 refusals.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from refusals import run, sections


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    for section in sections():
        if not section.on_two_ranks:
            continue
        told = ["", ""]
        try:
            run(section, rank)
        except Exception as error:
            told = [getattr(error, "code", type(error).__name__), str(error)]
        (folder / f"{section.code}.{rank}.json").write_text(json.dumps(told))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
