"""What only a GPU can show. Skipped without one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spcompile.ops import kernels
from spcompile.testing import simulate, zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
ON_GPU = [n for n, k in kernels.KERNELS.items() if "cuda" in k.devices and not k.missing()]


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("causal", [False, True])
def test_each_kernel_is_as_exact_as_its_dtype(name, causal):
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4, 192, 64, generator=make, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, scale=0.125)
    out, lse = kernels.attend(name, q, k, v, None, causal, 0.125, True)
    loose = 0.05 if name.startswith("sage") else 8 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=loose * want.abs().max().item())
    if kernels.KERNELS[name].returns_lse:
        scores = q.double() @ k.double().transpose(-1, -2) * 0.125
        if causal:
            scores = scores.masked_fill(~torch.ones(192, 192, device="cuda", dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@pytest.mark.parametrize("degrees", [{"sp": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2}], ids=str)
def test_models_are_exact_on_a_gpu(name, degrees):
    case = zoo.case(name, "odd")
    model = case.build().cuda()
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.inputs().items()}
    with torch.no_grad():
        want = model(**inputs)[0]
    for out in simulate(model, kwargs=inputs, **degrees).outputs:
        torch.testing.assert_close(out[0], want, rtol=0, atol=1e-5 * want.abs().max().item())
