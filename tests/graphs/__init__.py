"""Random models like diffusion transformers, each compared with its own eager run; failures are made small.

A `Program` is plain data: sizes, degrees and steps. Its steps write the source of an ``nn.Module``, which is run,
and printed where a program fails.
"""

# ruff: isort: off
# In this order the steps register, and a seed picks among them.
from graphs import streams, attention, tokens, joins, outputs  # noqa: F401
