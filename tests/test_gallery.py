"""docs/gallery.md is of the scripts in docs/gallery, each as it is. (`python docs/gallery.py --check` runs them.)"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from lossguard.__main__ import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)


def test_it_has_every_script():
    assert sorted(gallery.SCRIPTS) == sorted(path.stem for path in (DOCS / "gallery").glob("*.py"))


@pytest.mark.filterwarnings("ignore::lossguard.LossValidationWarning")
@pytest.mark.parametrize("name", gallery.SCRIPTS)
def test_what_it_shows(name, capfd, monkeypatch):
    """The script's source; and the exception's first line and causes, as they are now."""
    page = (DOCS / "gallery.md").read_text()
    assert (DOCS / "gallery" / f"{name}.py").read_text().split('"""', 2)[2].strip() in page
    monkeypatch.chdir(DOCS / "gallery")
    status = main(["run", "--immediately", f"{name}.py"])
    said = capfd.readouterr().err
    if status == 66:  # warned of
        return
    assert status == 65
    for line in said.splitlines():
        if line.startswith(("lossguard.", "  likely cause: ", "  or: ", "    fix: ")):
            assert line in page
