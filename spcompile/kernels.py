"""How users add attention kernels of their own."""

from __future__ import annotations

from spcompile.errors import SPConfigError
from spcompile.ops.kernels import KERNELS, AttentionKernel


def register_kernel(kernel: AttentionKernel) -> None:
    """Make a kernel available as ``spcompile.backend(kernel=kernel.name)``.

    Args:
        kernel: anything with the members of `spcompile.AttentionKernel`; `spcompile.Kernel` wraps a function.
            What it declares is what it is used for: a kernel that returns no log-sum-exp never enters a ring.
    Raises:
        SPConfigError: members are missing, or the name is taken.

    Example::

        def mine(q, k, v, mask, causal, scale, lse):
            return my_attention(q, k, v, scale), None

        kernel = spcompile.Kernel("mine", mine, devices={"cuda"}, dtypes={torch.bfloat16}, returns_lse=False)
        spcompile.register_kernel(kernel)
    """
    missing = [name for name in AttentionKernel.__annotations__ if not hasattr(kernel, name)]
    if missing or not isinstance(kernel, AttentionKernel):
        raise SPConfigError("SP108", f"{kernel!r} is no attention kernel: it lacks {', '.join(missing) or 'missing()'}")
    if kernel.name in KERNELS or kernel.name == "auto":
        raise SPConfigError("SP108", f"a kernel named {kernel.name!r} exists already")
    KERNELS[kernel.name] = kernel
