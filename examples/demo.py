"""One Flux-shaped model on one rank and on several, side by side: times, ratio, largest difference, report.

    python examples/demo.py            # starts torchrun with 2 ranks on this machine, one thread each

The model has Flux's architecture and proportions with random weights, so nothing is downloaded. Both runs have
the same weights and inputs and are compiled with Inductor. Steps of the two alternate, so that what else the
machine is doing falls on both. Exit code 1 if the outputs differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from rich.console import Console
from rich.table import Table
from torch import Tensor

import spcompile

HEADS, HEAD_DIM, TEXT_DIM, POOLED_DIM, CHANNELS = 8, 64, 256, 128, 64
TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the output's largest value: float32 rounding with room to spare."""


def build_model() -> torch.nn.Module:
    """Two double and four single blocks. Every parameter is drawn anew: diffusers starts some at zero."""
    model = FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        axes_dims_rope=(16, 24, 24),
    )
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=random)
            p.copy_(0.1 * noise + name.endswith("weight") if p.ndim == 1 else noise / p.shape[1] ** 0.5)
    return model.eval()


def make_inputs(image_tokens: int, text_tokens: int) -> dict[str, Tensor]:
    """One denoising step's arguments, batch 1."""
    random = torch.Generator().manual_seed(1)
    width = max(w for w in range(1, int(image_tokens**0.5) + 1) if image_tokens % w == 0)
    rows, columns = torch.meshgrid(torch.arange(image_tokens // width), torch.arange(width), indexing="ij")
    return dict(
        hidden_states=torch.randn(1, image_tokens, CHANNELS, generator=random),
        encoder_hidden_states=torch.randn(1, text_tokens, TEXT_DIM, generator=random),
        pooled_projections=torch.randn(1, POOLED_DIM, generator=random),
        timestep=torch.tensor([0.5]),
        img_ids=torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float(),
        txt_ids=torch.zeros(text_tokens, 3),
    )


def timed(step: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    """Seconds, seconds on a core, and the result of one step."""
    start, start_cpu = time.perf_counter(), time.process_time()
    out = step()
    return time.perf_counter() - start, time.process_time() - start_cpu, out


def timed_together(step: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    """`timed` on all ranks at once: the seconds of the slowest, and the least that any had a core."""
    dist.barrier()
    seconds, on_core, out = timed(step)
    slowest, least = torch.tensor(seconds), torch.tensor(on_core)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return slowest.item(), least.item(), out


@torch.inference_mode()
def run(sp: int, num_steps: int, image_tokens: int, text_tokens: int) -> None:
    """What every rank runs. Rank 0 also runs the one-rank steps, while the others sleep in a barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model, inputs = build_model(), make_inputs(image_tokens, text_tokens)
    backend = spcompile.backend(sp=sp)
    one, several = torch.compile(model), torch.compile(model, backend=backend)

    def step_one() -> Tensor:
        return one(**inputs, return_dict=False)[0]

    def step_several() -> Tensor:
        return several(**inputs, return_dict=False)[0]

    rounds: list[Any] = []
    for _ in range(2 + num_steps):  # the first compiles, the second warms up
        alone = timed(step_one) if first else None
        rounds.append((alone, timed_together(step_several)))
    difference = 0.0
    if first:
        (*_, want), (*_, got) = rounds[-1]
        difference = ((got - want).abs().max() / want.abs().max()).item()
        show(sp, rounds, difference, backend.report())
    dist.destroy_process_group()
    sys.exit(0 if difference <= TOLERANCE else 1)


def show(sp: int, rounds: list[Any], difference: float, report: spcompile.Report) -> None:
    """The table, then the backend's report."""
    table = Table(title=f"Flux-shaped model, Inductor, 1 thread per rank, median of {len(rounds) - 2} steps")
    for column in ("", "first call, s", "step, ms", "ratio", "collectives", "sent per rank", "largest difference"):
        table.add_column(column, justify="right" if column else "left")
    medians = [statistics.median(r[i][0] for r in rounds[2:]) for i in (0, 1)]
    calls = [rounds[0][i][0] for i in (0, 1)]
    sent = f"{report.bytes_per_rank / 2**20:.1f} MiB"
    table.add_row("1 rank", f"{calls[0]:.1f}", f"{1e3 * medians[0]:.0f}", "1.00", "0", "0", "")
    table.add_row(
        f"spcompile, {sp} ranks", f"{calls[1]:.1f}", f"{1e3 * medians[1]:.0f}", f"{medians[0] / medians[1]:.2f}",
        str(report.collectives), sent, f"{difference:.1e}",
    )  # fmt: skip
    Console(width=120).print(table)
    had_core = statistics.median(on_core / seconds for _, (seconds, on_core, _) in rounds[2:])
    if had_core < 0.85:
        print(f"Other work held the cores: ranks had one for {had_core:.0%} of a step. Idle cores give a better ratio.")
    print(report)


def launch(sp: int) -> int:
    """Run this file again on ``sp`` ranks, with a compile cache of its own so that the first call compiles."""
    with tempfile.TemporaryDirectory(prefix="spcompile-demo-") as cache:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sp)]
        return subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sp", type=int, default=2, help="number of ranks")
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each")
    parser.add_argument("--image-tokens", type=int, default=1024)
    parser.add_argument("--text-tokens", type=int, default=256)
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run(options.sp, options.steps, options.image_tokens, options.text_tokens)
    sys.exit(launch(options.sp))


if __name__ == "__main__":
    main()
