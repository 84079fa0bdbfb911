"""What ``lossguard env`` prints: versions, what was built, what is registered, and a self-test that runs."""

from __future__ import annotations

import functools
import os
import platform
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lossguard

from . import _C

__all__ = ["as_text", "describe"]

_WIDTH = 100
_DISPATCH_KEYS = ("CPU", "CUDA", "Meta")
_TOLERANCE = 1e-5  # of a difference, relative to the largest value: float32 sums in another order


def describe() -> dict[str, Any]:
    """Everything as plain data, ready for JSON. ``["ok"]``: whether the self-test passed."""
    build = _C.build_info()
    checks = _self_test(bool(build["cuda"]))
    return {
        "versions": {
            "lossguard": lossguard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "pybind11": build["pybind11"],
            "compiler": _compiler(build["compiler"]),
            "torch_abi_floor": build["torch_abi_floor"],
            "platform": platform.platform(),
        },
        "location": str(Path(lossguard.__file__).parent),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "kernels": list(_C.cpu_kernels()),
            "kernels_in_use": _C.cpu_kernels_in_use(),
        },
        "gpu": {
            "cuda_of_torch": torch.version.cuda,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "built": {"cpu": bool(_C.cpu_kernels()), "cuda": bool(build["cuda"]), **_cuda(build)},
        "ops": _registered(),
        "self_test": checks,
        "ok": all(check["ok"] for check in checks),
    }


# ---- facts


def _compiler(version: str) -> str:
    """GCC's __VERSION__ is a bare number; other compilers name themselves."""
    return f"gcc {version}" if re.fullmatch(r"[\d.]+", version) else version


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _registered() -> dict[str, dict[str, bool]]:
    """For each op of ``torch.ops.lossguard``, which dispatch keys have a kernel."""
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lossguard::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("lossguard::"): {key: has_kernel(name, key) for key in _DISPATCH_KEYS} for name in names}


# ---- self-test: each check returns what it found, or raises


def _batch(loss: str) -> tuple[Tensor, Tensor]:
    """A valid input and target of a loss, from a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 10, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    probabilities = torch.rand(64, 10, generator=generator)
    return {
        "BCELoss": (scores.sigmoid(), probabilities),
        "BCEWithLogitsLoss": (scores, probabilities),
        "NLLLoss": (scores.log_softmax(1), labels),
        "CrossEntropyLoss": (scores, labels),
    }[loss]


def _cuda(build: dict[str, Any]) -> dict[str, str]:
    if not build["cuda"]:
        return {}
    status = _C.cuda_status()
    version = f"supports CUDA {status['driver'] // 1000}.{status['driver'] % 1000 // 10}"
    return {"nvcc": build["nvcc"], "cuda_archs": build["cuda_archs"], "driver": status["error"] or version}


def _agrees_with_native(loss: str) -> str:
    input, target = _batch(loss)

    def forward_and_backward(package: Any) -> Tensor:
        leaf = input.clone().requires_grad_()
        value = getattr(package, loss)()(leaf, target)
        value.backward()
        assert leaf.grad is not None
        return torch.cat([value.detach().reshape(1), leaf.grad.flatten() * len(input)])  # of comparable size

    ours, native = forward_and_backward(lossguard), forward_and_backward(torch.nn)
    difference = float((ours - native).abs().max() / native.abs().max())
    if not difference <= _TOLERANCE:  # NaN fails too
        raise ValueError(f"relative difference {difference:.1e}, allowed {_TOLERANCE:.0e}")
    return f"relative difference {difference:.1e}"


def _reports(loss: str, tensor: str, index: tuple[int, ...], value: float) -> str:
    tensors = dict(zip(("input", "target"), _batch(loss)))
    tensors[tensor][index] = value
    try:
        getattr(lossguard, loss)()(**tensors)
    except lossguard.LossValidationError as error:
        report = error.report
        if (report.tensor, report.indices, report.values) != (tensor, [index], [value]):
            raise ValueError(f"reported {report.tensor} {report.indices} {report.values}") from None
        return f"{tensor}{list(index)} = {value}"
    raise ValueError("nothing was reported")


def _kernels_are_registered(keys: list[str]) -> str:
    ops = _registered()
    missing = [f"{op} for {key}" for op, found in ops.items() for key in keys if not found[key]]
    if missing or not ops:
        raise ValueError("missing: " + ", ".join(missing or ["all ops"]))
    return f"{len(ops)} ops for {', '.join(keys)}"


def _self_test(cuda: bool) -> list[dict[str, Any]]:
    keys = [key for key in _DISPATCH_KEYS if cuda or key != "CUDA"]
    checks: list[tuple[str, Callable[[], str]]] = [("kernels are registered", lambda: _kernels_are_registered(keys))]
    for loss in ("BCELoss", "BCEWithLogitsLoss", "NLLLoss", "CrossEntropyLoss"):
        checks.append((f"{loss}, forward and backward as native", functools.partial(_agrees_with_native, loss)))
    checks += [
        ("a bad label is reported, where and what", lambda: _reports("CrossEntropyLoss", "target", (37,), 97)),
        ("a bad probability likewise", lambda: _reports("BCELoss", "input", (3, 7), 1.5)),
        ("a good batch right afterwards", lambda: _agrees_with_native("CrossEntropyLoss")),
    ]
    with lossguard.guard(strict=True, check_finite=False, on_violation="raise"):
        return [_result(name, check) for name, check in checks]


def _result(name: str, check: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "ok": True, "detail": check()}
    except Exception as error:
        return {"name": name, "ok": False, "detail": f"{type(error).__name__}: {error}"}


# ---- text


def as_text(environment: dict[str, Any]) -> str:
    versions, cpu, gpu, built = (environment[key] for key in ("versions", "cpu", "gpu", "built"))
    cuda_of_torch = f"CUDA {gpu['cuda_of_torch']}" if gpu["cuda_of_torch"] else "built without CUDA"
    checks = environment["self_test"]
    failed = sum(not check["ok"] for check in checks)
    lines = [
        f"lossguard {versions['lossguard']}",
        *_row("location", environment["location"]),
        *_row("Python", versions["python"]),
        *_row("torch", f"{versions['torch']}, {cuda_of_torch}"),
        *_row("compiler", f"{versions['compiler']}, pybind11 {versions['pybind11']}"),
        *_row("torch ABI", f"stable, for torch {versions['torch_abi_floor']} and newer"),
        *_row("platform", versions["platform"]),
        *_row("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['threads']} threads"),
        *_row("CPU kernels", f"{', '.join(cpu['kernels'])} (in use: {cpu['kernels_in_use']})"),
        *_row("GPU", ", ".join(gpu["devices"]) or "none"),
        "",
        "built",
        *_row("CPU half", "yes" if built["cpu"] else "no"),
        *_row("CUDA half", f"yes, by nvcc {built['nvcc']} for {built['cuda_archs']}" if built["cuda"] else "no"),
        *(_row("driver", built["driver"]) if built["cuda"] else []),
        "",
        f"{'registered ops':<34}" + "".join(f"{key:<6}" for key in _DISPATCH_KEYS).rstrip(),
    ]
    for op, found in environment["ops"].items():
        marks = "".join(f"{'yes' if found[key] else '-':<6}" for key in _DISPATCH_KEYS)
        lines.append(f"  {op:<32}{marks}".rstrip())
    lines += ["", "self-test"]
    for check in checks:
        lines += _row("ok" if check["ok"] else "FAILED", f"{check['name']:<49}  {check['detail']}", label_width=6)
    lines += ["", f"{failed} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks passed"]
    return "\n".join(lines)


def _row(label: str, value: str, label_width: int = 11) -> list[str]:
    start = f"  {label:<{label_width}}  "
    return textwrap.wrap(value, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
