import os

# One thread a worker (pytest-xdist has one for each core); tests of threads ask for their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lossguard.functional  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

EMULATED = lossguard._C.build_info().get("emulated", False)
if EMULATED or torch.cuda.is_available():  # as on the CPU, which most tests were written for; see test_deferred.py
    lossguard.configure(when="immediately")
    os.environ["LOSSGUARD_WHEN"] = "immediately"  # for the processes that tests start

# `make test-emulated` runs the suite on the CUDA kernels, by way of tests/cuda_emulator. These files would say
# nothing new there: what they test is not a kernel, or code that inductor generated around the same op.
SAID_BEFORE = [
    "test_audit.py",
    "test_build.py",
    "test_command_line.py",
    "test_compile.py",
    "test_cuda_build.py",
    "test_cuda_emulator.py",
    "test_cuda_mutants.py",
    "test_cuda_sanitizers.py",
    "test_datasets.py",
    "test_demo.py",
    "test_diagnosis.py",
    "test_gallery.py",
    "test_gpu_session.py",
    "test_integrations.py",
    "test_memory.py",
    "test_preflight.py",
    "test_run.py",
    "test_run_libraries.py",
    "test_vector_math.py",
]
collect_ignore = SAID_BEFORE if EMULATED else []


def pytest_report_header(config):
    if EMULATED:
        return ["lossguard: CUDA kernels on the emulator. Not run again: " + ", ".join(SAID_BEFORE)]


@pytest.fixture(autouse=True)
def kernels_for_few_rows_too(monkeypatch):
    """Small NLL calls go to native torch (see `_FEW`): here the kernels are to be tested at every size."""
    monkeypatch.setattr(lossguard.functional, "_FEW", -1)
