"""The CUDA half as it was built: kernels registered for every op, code for every GPU, registers and stack as promised.

`make check-build` runs this on a build for all architectures of a release, and names them in LOSSGUARD_CHECK_BUILD.
"""

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_build
import lossguard
import pytest
import torch

EXTENSION = Path(lossguard._C.__file__)
BUILD = lossguard._C.build_info()
TABLE = Path(__file__).parent / "ptxas.txt"
OPS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lossguard::"))
CHECKED = os.environ.get("LOSSGUARD_CHECK_BUILD", "")

pytestmark = pytest.mark.skipif(not BUILD["cuda"], reason="this lossguard was built without nvcc: it has no CUDA half")
of_a_release = pytest.mark.skipif(not CHECKED, reason="of a build for all architectures: `make check-build`")


@pytest.fixture(scope="module")
def usage():
    found = cuda_build.ptxas_usage(cuda_build.objects_of(EXTENSION))
    if not found:
        pytest.skip("this lossguard was installed from a wheel: what ptxas said is not there")
    return found


def test_every_op_has_a_cuda_kernel():
    """Also where torch has none of its own: this holds under a torch built for CPUs alone."""
    assert OPS and [op for op in OPS if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")] == []


def test_each_source_has_code_for_each_architecture():
    archs = BUILD["cuda_archs"].split()
    assert not CHECKED or archs == CHECKED.split()
    number = {arch: arch.removesuffix("+PTX").rstrip("af") for arch in archs}
    expected = {("machine code", number[arch]) for arch in archs}
    expected |= {("PTX", number[arch]) for arch in archs if arch.endswith("+PTX")}

    binaries = cuda_build.fat_binaries(EXTENSION)
    assert len(binaries) == len(list(cuda_build.ROOT.glob("csrc/cuda/*.cu")))
    for codes in binaries:
        assert {(code.kind, code.arch) for code in codes} == expected
        assert all(code.content for code in codes)


def each(usage):
    """Every kernel on every architecture: what to call it, its name, what ptxas said."""
    for source, kernels in usage.items():
        names = cuda_build.readable(kernels)
        for kernel, by_arch in kernels.items():
            for arch, used in by_arch.items():
                yield f"{source}: {names[kernel]} on {arch}: {used}", kernel, used


def test_no_kernel_spills_or_has_a_stack_frame(usage):
    assert any(usage.values())
    bad = [what for what, _, used in each(usage) if used.stack or used.spilled]
    assert not bad, "\n".join(bad)


@of_a_release
def test_registers_are_within_what_the_launch_bounds_promise(usage):
    """A multiprocessor has 65,536 registers, and gives them out by eights for a warp's threads."""
    bounds = cuda_build.launch_bounds(EXTENSION)
    for what, kernel, used in each(usage):
        threads, blocks = bounds[kernel]
        assert threads > 0, f"no __launch_bounds__: {what}"
        assert -(-used.registers // 8) * 8 * threads * blocks <= 65536, what


@of_a_release
def test_the_table_of_registers_is_up_to_date(usage):
    committed, built = TABLE.read_text(), cuda_build.table(EXTENSION, BUILD["nvcc"])
    if committed.splitlines()[0] != built.splitlines()[0]:
        pytest.skip(f"the table is of another compiler than CUDA {BUILD['nvcc']}")
    changed = difflib.unified_diff(committed.splitlines(), built.splitlines(), "tests/ptxas.txt", "this build", n=0)
    assert "\n".join(changed) == "", "if that is how it should be: `make ptxas-table`, and commit it"


# ---- a driver that is too old, or absent

STATUS_AND_A_LOSS = """
import json, lossguard, torch
loss = lossguard.CrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([0, 1]))
print(json.dumps([lossguard._C.cuda_status(), loss.item()]))
"""


def status_and_a_loss(driver):
    """In a process that finds this CUDA driver first."""
    search = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")]))
    environment = dict(os.environ, LD_LIBRARY_PATH=search)
    done = subprocess.run([sys.executable, "-c", STATUS_AND_A_LOSS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fake_driver(folder, version):
    """A libcuda.so.1 which says that it supports CUDA `version`, and has nothing else."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    source = folder / "libcuda.c"
    source.write_text(
        "int cuInit(unsigned flags) { return 0; }\n"
        f"int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"], check=True)


def test_a_driver_that_is_too_old_is_named_with_both_versions_and_the_cpu_half_works(tmp_path):
    fake_driver(tmp_path, 11040)
    status, loss = status_and_a_loss(tmp_path)
    built_with = BUILD["nvcc"]
    assert status["driver"] == 11040
    assert f"{status['runtime'] // 1000}.{status['runtime'] % 1000 // 10}" == built_with
    assert "11.4" in status["error"] and built_with in status["error"] and "driver" in status["error"]
    assert loss == pytest.approx(1.0986123)


def test_no_driver_is_not_an_old_driver(tmp_path):
    """A libcuda.so.1 that cannot be loaded hides the machine's own, if it has one."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    status, loss = status_and_a_loss(tmp_path)
    assert status["driver"] == 0
    assert "no NVIDIA driver" in status["error"] and "0.0" not in status["error"]
    assert loss == pytest.approx(1.0986123)
