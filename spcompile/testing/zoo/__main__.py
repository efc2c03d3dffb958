"""``python -m spcompile.testing.zoo``: run every class on simulated ranks and write the table of the docs."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

import torch

from spcompile.testing.zoo import names
from spcompile.testing.zoo.record import line, record, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spcompile.testing.zoo", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], choices=names(), metavar="NAME",
        help=f"print these rows and write nothing; of {', '.join(names())}",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("docs/models.md"), help="the page (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="models at a time; all take about 10 minutes on two")
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
