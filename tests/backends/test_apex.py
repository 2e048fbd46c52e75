"""apex: found by its extension modules, another package of the name is named; its optimizer and kernel are used where they can be."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch

from megadcp.backends import apex_backend, torch_sharded
from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.check import UserError
from megadcp.nn import compiled
from megadcp.parallel.product import PLAIN, PlainProduct

BOOM = "raise RuntimeError('looking for apex must not run it')\n"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Puts modules and distributions, none of which may be imported, into a folder of packages."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(modules=(), version=None, summary="", files=()):
        for name in modules:
            (tmp_path / f"{name}.py").write_text(BOOM)
        if version is not None:
            info = tmp_path / f"apex-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\nSummary: {summary}\n")
            (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
            (tmp_path / "apex").mkdir()
            (tmp_path / "apex" / "__init__.py").write_text(BOOM)
        importlib.invalidate_caches()
        return apex_backend.probe()

    return put


def test_none(packages):
    found = packages()
    assert not found.adam
    assert not found.wgrad
    assert found.message == "NVIDIA apex is not installed; it is optional"


def test_whole(packages):
    found = packages(("amp_C", "fused_weight_gradient_mlp_cuda"), "0.1", files=("apex/optimizers/fused_adam.py",))
    assert found.adam
    assert found.wgrad
    assert "apex" not in sys.modules


def test_a_part(packages):
    found = packages(("amp_C",), "0.1")
    assert (found.adam, found.wgrad) == (True, False)
    assert "built without fused_weight_gradient_mlp_cuda" in found.message


def test_the_package_of_the_same_name_is_named(packages):
    found = packages((), "0.9.10.dev0", "Pyramid toolkit to add Velruse, Flash Messages", ("apex/__init__.py", "apex/forms.py"))
    assert not found.adam
    assert not found.wgrad
    assert "apex 0.9.10.dev0 is not NVIDIA's" in found.message
    assert "Pyramid toolkit" in found.message
    assert "APEX_CUDA_EXT=1" in found.message
    assert "\n" not in found.message


def test_nvidias_without_extensions(packages):
    found = packages((), "0.1", "PyTorch Extensions written by NVIDIA", ("apex/__init__.py", "apex/optimizers/fused_adam.py"))
    assert not found.adam
    assert "apex 0.1 was built without its CUDA extensions" in found.message
    assert "not NVIDIA's" not in found.message


# --------------------------------------------------------------------------------------------------------------- optimizer
class FusedAdam(torch.optim.Optimizer):
    """As apex's behaves: counts updates by group, state by parameter without a count; the update is AdamW's in plain operations."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0, **others):
        assert bias_correction
        assert adam_w_mode
        assert not others
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            low, high = group["betas"]
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(one), torch.zeros_like(one)
                state["exp_avg"].mul_(low).add_(one.grad, alpha=1 - low)
                state["exp_avg_sq"].mul_(high).addcmul_(one.grad, one.grad, value=1 - high)
                first = state["exp_avg"] / (1 - low ** group["step"])
                second = state["exp_avg_sq"] / (1 - high ** group["step"])
                one.sub_(group["lr"] * (first / (second.sqrt() + group["eps"]) + group["weight_decay"] * one))


@pytest.fixture
def apex(monkeypatch):
    """apex is there and takes tensors on a CPU."""
    package = type(sys)("apex.optimizers")
    package.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", type(sys)("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", package)
    monkeypatch.setattr(apex_backend, "takes", lambda groups: True)
    monkeypatch.setattr(apex_backend, "probe", lambda: apex_backend.Apex(True, True, ""))


def _groups(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,), (2, 2))
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return [{"params": made[::2], "weight_decay": 0.1}, {"params": made[1:2], "weight_decay": 0.0}], made


def _steps(optimizer, parameters, first, count):
    for number in range(first, first + count):
        for index, one in enumerate(parameters):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * number + index))
        optimizer.step()


def test_the_update_is_torchs(apex):
    ours, parameters = _groups()
    theirs, others = _groups()
    fused = TorchBackend().optimizer(ours, 0.01, (0.9, 0.95), 1e-8)
    plain = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    assert isinstance(fused, FusedAdam)
    _steps(fused, parameters, 0, 5)
    _steps(plain, others, 0, 5)
    for one, other in zip(parameters, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_it_continues_from_torchs_state(apex):
    """What train/optim.py hands over: counts by parameter; the next update has the right bias correction."""
    theirs, others = _groups()
    plain = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    _steps(plain, others, 0, 3)
    ours, parameters = _groups()
    fused = TorchBackend().optimizer(ours, 0.01, (0.9, 0.95), 1e-8)
    with torch.no_grad():
        for one, other in zip(parameters, others, strict=True):
            one.copy_(other)
    fused.load_state_dict({"state": copy.deepcopy(plain.state_dict()["state"]), "param_groups": fused.state_dict()["param_groups"]})
    _steps(fused, parameters, 3, 2)
    _steps(plain, others, 3, 2)
    for one, other in zip(parameters, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_without_apex_or_a_gpu_it_is_torchs(monkeypatch):
    groups, _ = _groups()
    assert type(TorchBackend().optimizer(groups, 0.01, (0.9, 0.95), 1e-8)) is torch.optim.AdamW
    monkeypatch.setattr(apex_backend, "probe", lambda: apex_backend.Apex(True, True, ""))
    assert type(TorchBackend().optimizer(groups, 0.01, (0.9, 0.95), 1e-8)) is torch.optim.AdamW  # tensors on a CPU


# ------------------------------------------------------------------------------------------------------------ fused sums
def test_the_kernel_gets_what_it_wants(monkeypatch):
    """x, slope, sums, contiguous; it adds slope^T x."""
    kernel = type(sys)(apex_backend.WGRAD)

    def accumulate(x, slope, total):
        assert x.is_contiguous()
        assert slope.is_contiguous()
        total += slope.t().float() @ x.float()

    kernel.wgrad_gemm_accum_fp32 = accumulate
    monkeypatch.setitem(sys.modules, apex_backend.WGRAD, kernel)
    x, slope = torch.randn(6, 8).to(torch.bfloat16), torch.randn(4, 6).to(torch.bfloat16).t()
    total = torch.ones(4, 8)
    apex_backend.add_product()(x, slope, total)
    assert torch.allclose(total, 1 + slope.t().float() @ x.float())


@pytest.mark.parametrize(("dtype", "device", "there", "fused"), [
    (torch.bfloat16, "cuda", True, True),
    (torch.bfloat16, "cuda", False, False),
    (torch.float32, "cuda", True, False),
    (torch.bfloat16, "cpu", True, False),
])  # fmt: skip
def test_fused_sums_are_for_bf16_on_a_gpu(monkeypatch, dtype, device, there, fused):
    monkeypatch.setattr(apex_backend, "probe", lambda: apex_backend.Apex(there, there, ""))
    monkeypatch.setattr(apex_backend, "add_product", lambda: lambda x, slope, total: None)
    product = torch_sharded.torch_backend(dtype, device).product
    assert product.fused == fused
    assert isinstance(product, PlainProduct)
    assert (product is PLAIN) != fused


def test_a_run_says_what_it_lacks(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(apex_backend, "probe", lambda: apex_backend.Apex(False, False, "NVIDIA apex is not installed; it is optional"))
    monkeypatch.setattr(compiled, "missing", lambda: "Triton")
    assert torch_sharded.explain(torch.device("cpu")) == "PyTorch's own kernels"
    assert torch_sharded.explain(torch.device("cpu"), "fp8_current") == "linears in fp8_current through torch._scaled_mm"
    assert torch_sharded.explain(cuda, "fp8_block").startswith(
        "linears in fp8_block, rounded and multiplied in bf16; norm, rope and gated product not"
    )
    assert "for want of Triton; NVIDIA apex is not installed" in torch_sharded.explain(cuda)
    monkeypatch.setattr(compiled, "missing", lambda: "")
    assert "gated product compiled; " in torch_sharded.explain(cuda)


def test_old_gpus_are_refused_for_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"compute capability 8\.0, fp8 products need 8\.9 or newer; legal here: bf16, fp32"):
        torch_sharded.torch_backend(torch.bfloat16, "cuda", fp8="fp8_current")
    torch_sharded.torch_backend(torch.bfloat16, "cuda", fp8="fp8_block")
