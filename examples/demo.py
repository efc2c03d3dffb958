"""One Flux-shaped model on one rank and on several, side by side: times, ratio, largest difference, report.

    python examples/demo.py            # starts torchrun with 2 ranks on this machine, one thread each

The model has Flux's architecture and proportions with random weights, so nothing is downloaded. All runs have the
same weights and inputs and are compiled with Inductor; beside one rank and spcompile there is what diffusers does with
the plan that it has for this class, written by hand. Their steps alternate, so that what else the machine is doing
falls on all. Exit code 1 if the outputs of spcompile and of one rank differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from rich.console import Console
from rich.table import Table
from torch import Tensor

import spcompile

HEADS, HEAD_DIM, TEXT_DIM, POOLED_DIM, CHANNELS = 8, 64, 256, 128, 64
TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the output's largest value: float32 rounding with room to spare."""


def build_model() -> FluxTransformer2DModel:
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


def planned_by_hand(sp: int) -> torch.nn.Module:
    """The model under diffusers' own plan for it: Ulysses."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # diffusers calls collectives by their former names
    model = build_model()
    with mock.patch.object(torch.accelerator, "device_count", return_value=sp):  # it counts, and divides by them
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=sp))
    return model


@torch.inference_mode()
def run(sp: int, num_steps: int, image_tokens: int, text_tokens: int) -> None:
    """What every rank runs. Rank 0 also runs the one-rank steps, while the others sleep in a barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model, inputs = build_model(), make_inputs(image_tokens, text_tokens)
    backend = spcompile.backend(sp=sp)
    alone = torch.compile(model)
    together = (torch.compile(planned_by_hand(sp)), torch.compile(model, backend=backend))

    def step(compiled: Callable[..., Any]) -> Callable[[], Tensor]:
        return lambda: compiled(**inputs, return_dict=False)[0]

    rounds: list[Any] = []
    for _ in range(2 + num_steps):  # the first compiles, the second warms up
        one = [timed(step(alone))] if first else []
        rounds.append([*one, *(timed_together(step(several)) for several in together)])
    difference = 0.0
    if first:
        want, *others = (out for *_, out in rounds[-1])
        differences = [((got - want).abs().max() / want.abs().max()).item() for got in others]
        show(sp, rounds, differences, backend.report())
        difference = differences[-1]
    dist.destroy_process_group()
    sys.exit(0 if difference <= TOLERANCE else 1)


def show(sp: int, rounds: list[Any], differences: list[float], report: spcompile.Report) -> None:
    """The table, then the backend's report."""
    table = Table(title=f"Flux-shaped model, Inductor, 1 thread per rank, median of {len(rounds) - 2} steps")
    for column in ("", "first call, s", "step, ms", "ratio", "largest difference", "collectives", "sent per rank"):
        table.add_column(column, justify="right" if column else "left")
    sent = f"{report.bytes_per_rank / 2**20:.1f} MiB"
    names = ("1 rank", f"diffusers' plan, {sp} ranks", f"spcompile, {sp} ranks")
    ends = (("", "0", "0"), (f"{differences[0]:.1e}",), (f"{differences[1]:.1e}", str(report.collectives), sent))
    medians = [statistics.median(r[i][0] for r in rounds[2:]) for i in range(len(names))]
    for i, (name, median, end) in enumerate(zip(names, medians, ends, strict=True)):
        ratio = f"{medians[0] / median:.2f}"
        table.add_row(name, f"{rounds[0][i][0]:.1f}", f"{1e3 * median:.0f}", ratio, *end)
    Console(width=120).print(table)
    had_core = statistics.median(on_core / seconds for *_, (seconds, on_core, _) in rounds[2:])
    if had_core < 0.85:
        print(f"Other work held the cores: ranks had one for {had_core:.0%} of a step. Idle cores give a better ratio.")
    print(report)


def launch(sp: int) -> int:
    """Run this file again on ``sp`` ranks, with a compile cache of its own so that the first call compiles."""
    with tempfile.TemporaryDirectory(prefix="spcompile-demo-") as cache:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        environment["TORCH_CPP_LOG_LEVEL"] = (
            "ERROR"  # c10d warns of collectives that diffusers' plan leaves to Inductor
        )
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
