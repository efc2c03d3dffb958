"""``python -m spcompile.testing.zoo``: run every class on simulated ranks and write the table of the docs."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

import torch

from spcompile.testing.zoo import names
from spcompile.testing.zoo.record import line, record, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="short names; prints their rows and writes nothing")
    parser.add_argument("--output", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    records = []
    with multiprocessing.get_context("spawn").Pool(options.processes, torch.set_num_threads, (1,)) as pool:
        for found in pool.imap_unordered(record, options.only or names()):
            print(f"{found.name:16} {found.largest:.1e} {line(found)}", flush=True)
            records.append(found)
    if not options.only:
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(table(records))


if __name__ == "__main__":
    main()
