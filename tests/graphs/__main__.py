"""Random programs from the command line; failures are made small.

cd tests; python -m graphs --count 200 --seed 0
cd tests; python -m graphs --count 1 --seed 17 --show
"""

from __future__ import annotations

import argparse
import math
import time

import torch

import spcompile
from graphs.check import check
from graphs.generate import generate
from graphs.program import script
from graphs.shrink import shrink
from graphs.sweep import describe, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--shrink", type=int, default=60, help="runs spent on each failure")
    parser.add_argument("--show", action="store_true", help="print every program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    start = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    if options.show:
        for seed in seeds:
            print(script(generate(seed)))
    print(spcompile.__file__)
    tally = sweep(seeds, start + options.seconds, show=True)
    print(f"{tally.total} programs in {time.monotonic() - start:.0f} s: {dict(tally.counts)}")
    for text, n in tally.refusals.most_common(15):
        print(f"{n:5} {text}")
    for program, outcome in tally.failures:
        small = shrink(program, outcome.kind, options.shrink)
        print(describe(small, check(small)), flush=True)


if __name__ == "__main__":
    main()
