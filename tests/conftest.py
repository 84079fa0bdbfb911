import os

# One thread a worker (pytest-xdist has one for each core); tests of threads ask for their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lossguard.functional  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def kernels_for_few_rows_too(monkeypatch):
    """Small NLL calls go to native torch (see `_FEW`): here the kernels are to be tested at every size."""
    monkeypatch.setattr(lossguard.functional, "_FEW", -1)
