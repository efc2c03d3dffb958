"""A small server: it warms up a set of resolutions, then answers requests with steps from CUDA graphs.

    python examples/serve.py                                     # two ranks on this machine
    torchrun --nproc-per-node 8 examples/serve.py --form full    # as it would be deployed, on GPUs with NCCL

Rank 0 takes the requests and tells the others, so that all ranks make the same calls in the same order. Each request
is a prompt's embedding and a resolution; it takes a few denoising steps of a Flux-shaped model with random weights.

CUDA graphs need CUDA: on CPUs the same loop runs with ``cudagraphs="off"``, and says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import Tensor

import spcompile

RESOLUTIONS = ((16, 16), (16, 24), (24, 16))
"""Latent rows and columns that are served, one token each. Those of as many tokens share a graph."""
TEXT, TEXT_DIM, POOLED_DIM, CHANNELS = 64, 64, 32, 64
WARM_UP_STEPS = 3
"""The first compiles and warms up, the second records, the third replays for the first time."""


@dataclass(frozen=True)
class Request:
    """What a client asks for. ``seed`` stands for the prompt and for the noise."""

    resolution: tuple[int, int]
    seed: int
    num_steps: int


def build_model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on every rank; a deployment loads a checkpoint here
    model = FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=1, num_single_layers=2, num_attention_heads=8, attention_head_dim=16,
        joint_attention_dim=TEXT_DIM, pooled_projection_dim=POOLED_DIM, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


class Server:
    """Every rank has one; all serve the same requests in the same order."""

    def __init__(self, form: str, device: torch.device) -> None:
        self.device, self.model = device, build_model(device)
        torch._dynamo.config.recompile_limit = max(8, 2 * len(RESOLUTIONS))  # a graph for each resolution
        self.backend = spcompile.backend(cudagraphs=form, max_recordings=2 * len(RESOLUTIONS))
        self.compiled = torch.compile(self.model, backend=self.backend, dynamic=False)

    def warm_up(self) -> None:
        """Compile, warm up and record every resolution before the first client waits for it."""
        for resolution in RESOLUTIONS:
            start = time.perf_counter()
            self.serve(Request(resolution, seed=0, num_steps=WARM_UP_STEPS))
            say(f"ready for {resolution[0]}x{resolution[1]} after {time.perf_counter() - start:.1f} s")

    @torch.inference_mode()
    def serve(self, request: Request) -> Tensor:
        """Denoise. Latents stay on the device between steps; each step's output is ours to keep."""
        inputs = self.inputs(request)
        latents = inputs.pop("hidden_states")
        for step in range(request.num_steps):
            timestep = torch.full((1,), 1 - step / request.num_steps, device=self.device, dtype=latents.dtype)
            velocity = self.compiled(hidden_states=latents, timestep=timestep, return_dict=False, **inputs)[0]
            latents = latents - velocity / request.num_steps
        return latents

    def inputs(self, request: Request) -> dict[str, Any]:
        """The same on every rank: drawn on the host, from the request's seed."""
        rows, columns = request.resolution
        draw = torch.Generator().manual_seed(request.seed)
        dtype = next(self.model.parameters()).dtype

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(self.device, dtype)

        places = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
        return dict(
            hidden_states=normal(1, rows * columns, CHANNELS),
            encoder_hidden_states=normal(1, TEXT, TEXT_DIM),
            pooled_projections=normal(1, POOLED_DIM),
            img_ids=places.to(self.device, dtype),
            txt_ids=torch.zeros(TEXT, 3, device=self.device, dtype=dtype),
        )


def requests(num: int, num_steps: int) -> Iterator[Request]:
    """What clients ask of rank 0; a deployment reads a queue here."""
    for i in range(num):
        yield Request(RESOLUTIONS[i % len(RESOLUTIONS)], seed=i + 1, num_steps=num_steps)


def loop(server: Server, num: int, num_steps: int) -> None:
    """Rank 0 hands each request to all; None ends the loop everywhere."""
    pending = requests(num, num_steps) if dist.get_rank() == 0 else None
    seconds: list[float] = []
    while True:
        message: list[Request | None] = [next(pending, None) if pending is not None else None]
        dist.broadcast_object_list(message, src=0, device=server.device)
        (request,) = message
        if request is None:
            break
        start = time.perf_counter()
        latents = server.serve(request)
        checksum = float(latents.float().abs().mean())  # waits for the device
        seconds.append((time.perf_counter() - start) / request.num_steps)
        say(f"{request}: {1e3 * seconds[-1]:.1f} ms per step, mean of |latents| {checksum:.4f}")
    say(f"served {len(seconds)} requests, median {1e3 * statistics.median(seconds):.1f} ms per step")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(form: str, num: int, num_steps: int) -> None:
    """What every rank runs."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if not on_gpu:
        say(f"no CUDA GPU here: serving on CPUs with cudagraphs='off' instead of {form!r}")
        form = "off"
    server = Server(form, device)
    with server.backend:  # graphs and communicators go before the process group
        server.warm_up()
        loop(server, num, num_steps)
        say(str(server.backend.report()).splitlines()[0])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--form", choices=("off", "piecewise", "full"), default="piecewise", help="cudagraphs=")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, without torchrun")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="denoising steps of each request")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run(options.form, options.requests, options.steps)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
