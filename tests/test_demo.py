"""The demo: four accidents told in full and truthfully, and training that goes on after each."""

import io
import re
import subprocess
import sys
from pathlib import Path

import lossguard
import pytest
import torch
from lossguard import demo
from lossguard.__main__ import main


@pytest.fixture(scope="module")
def run():
    return subprocess.run(
        [sys.executable, "-m", "lossguard", "demo"],
        cwd=Path(lossguard.__file__).parents[1],  # so that its path is short in the message
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def sections(run):
    """Heading -> text with its lines joined, as a reader takes them in."""
    parts = re.split(r"^  (.+)\n  -+\n", run.stdout, flags=re.MULTILINE)
    return {title: " ".join(text.split()) for title, text in zip(parts[1::2], parts[2::2])}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TITLES = ["1. Labels counted from 1", "2. A 255 in a mask", "3. NaN probabilities", "4. A forgotten sigmoid"]

# Where each accident was planted, native's own words, and what lossguard says besides.
ACCIDENTS = {
    TITLES[0]: (
        "Epoch 1, batch 11. Native torch.nn.CrossEntropyLoss on this batch says: "
        "IndexError: Target 10 is out of bounds.",
        [
            "lossguard.CrossEntropyLoss says: TargetOutOfBoundsError: Target 10 is out of bounds. CrossEntropyLoss: ",
            "of 64 targets are outside [0, 10).",
            "counts: == num_classes: ",
            "valid: 0..9",
            "likely cause: labels look 1-based (they run from 1 to 10, none is 0): subtract 1",
        ],
    ),
    TITLES[1]: (
        "Epoch 1, batch 7. Native torch.nn.CrossEntropyLoss on this batch says: "
        "IndexError: Target 255 is out of bounds.",
        [
            "lossguard.CrossEntropyLoss says: TargetOutOfBoundsError: Target 255 is out of bounds. CrossEntropyLoss: "
            "1 of 4096 targets is outside [0, 2).",
            "(16, 7, 2) 255",
            "logits (64, 2, 8, 8) float32 cpu, target (64, 8, 8) int64",
            "pass ignore_index=255",
        ],
    ),
    TITLES[2]: (
        "Epoch 1, batch 8. Native torch.nn.BCELoss on this batch says: "
        "RuntimeError: all elements of input should be between 0 and 1 ",
        [
            "lossguard.BCELoss says: ValueOutOfRangeError: all elements of input should be between 0 and 1. BCELoss: "
            "10 of 640 elements of input are outside [0, 1].",
            "(52, 0) nan (52, 1) nan",
            "counts: NaN: 10",
            "likely cause: NaN in the input",
        ],
    ),
    TITLES[3]: (
        "Epoch 1, batch 23. Native torch.nn.BCELoss on this batch says: "
        "RuntimeError: all elements of input should be between 0 and 1 ",
        [
            "lossguard.BCELoss says: ValueOutOfRangeError: all elements of input should be between 0 and 1. BCELoss: ",
            "of 29 elements of input are outside [0, 1].",
            "likely cause: the input looks like logits, not probabilities: use BCEWithLogitsLoss",
        ],
    ),
}


def test_it_succeeds(run):
    assert run.returncode == 0
    assert run.stderr == ""


def test_it_fits_a_plain_terminal_of_100_columns(run):
    assert max(map(len, run.stdout.splitlines())) <= 100
    assert run.stdout.isascii()
    assert "\033" not in run.stdout  # stdout is no terminal


def test_headings(sections):
    assert list(sections) == [*TITLES, "Summary"]


@pytest.mark.parametrize("title", TITLES)
def test_an_accident_is_told(sections, title):
    native, ours = ACCIDENTS[title]
    text = sections[title]
    assert native in text
    for words in ours:
        assert words in text


@pytest.mark.parametrize("title", TITLES)
def test_the_message_names_the_line_of_the_training_loop(sections, title):
    called = re.search(r"called at lossguard/demo\.py:(\d+) in train: (.+?) likely cause", sections[title])
    assert called is not None
    source = Path(demo.__file__).read_text().splitlines()
    assert source[int(called[1]) - 1].strip() == called[2] == "loss = criterion(outputs, targets)"


@pytest.mark.parametrize("title", TITLES)
def test_the_batch_leaves_no_trace(sections, title):
    assert "The batch was skipped by `except lossguard.LossValidationError`." in sections[title]
    before, after = re.search(r"\(checksum (\w{8}) before, (\w{8}) after\)", sections[title]).groups()
    assert before == after


@pytest.mark.parametrize("title", TITLES)
def test_training_goes_on(sections, title):
    epochs = re.findall(r"epoch (\d) of 5: mean loss (\d+\.\d+) over (\d+) batches, (\d) skipped", sections[title])
    skipped = 2 if title == TITLES[0] else 1
    assert [(int(e), int(n), int(s)) for e, _, n, s in epochs] == [(e, 23 - skipped, skipped) for e in range(1, 6)]
    losses = [float(loss) for _, loss, _, _ in epochs]
    assert losses[-1] < losses[0] / 2
    assert accuracies(sections[title])[0] > 90


def accuracies(text):
    return [float(number) for number in re.findall(r"(\d+\.\d)%", text)]


def test_the_accuracy_of_telling_digits_apart(sections):
    assert accuracies(sections[TITLES[0]])[0] > 95


def test_what_cuda_does_is_said_once(run):
    assert " ".join(run.stdout.split()).count("`CUDA error: device-side assert triggered`") == 1


def test_summary(sections):
    text = sections["Summary"]
    assert "trained on skipped test accuracy" in text
    for title in TITLES:
        trained, skipped = (105, 10) if title == TITLES[0] else (110, 5)
        assert f"{title} {trained} {skipped} {accuracies(sections[title])[0]}%" in text
    assert "4 accidents; 460 batches" in text and "25 of them caught and skipped" in text
    assert "README.md" in text


def test_it_is_deterministic_and_quick(sections, capsys, one_thread):
    assert main(["demo"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    again = text.split("test accuracy")[-1]
    first = sections["Summary"].split("test accuracy")[-1]
    seconds = re.compile(r"in (\d+\.\d) s")
    assert seconds.sub("", again) == seconds.sub("", first)
    assert float(seconds.search(text)[1]) < 20


def test_without_scikit_learn(monkeypatch, capsys, one_thread):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # import sklearn: ModuleNotFoundError
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "pip install scikit-learn" in err


# ---- it does not claim what is not so


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("what", ["weight", "buffer", "optimizer", "sign of zero"])
def test_checksum_sees_every_bit(network, what):
    model, optimizer = network
    if what == "sign of zero":
        model[0].bias.data.zero_()
    before = demo.checksum(model, optimizer)
    assert demo.checksum(model, optimizer) == before
    changed = {
        "weight": model[0].weight.data[2],
        "buffer": model[1].running_mean,
        "optimizer": optimizer.state[model[0].weight]["exp_avg_sq"],
        "sign of zero": model[0].bias.data,
    }[what]
    if what == "sign of zero":
        changed.neg_()
    else:
        changed.view(-1)[:1].copy_(torch.nextafter(changed.view(-1)[:1], torch.tensor(9.0)))
    assert demo.checksum(model, optimizer) != before


def error_and_batch():
    outputs, targets = torch.zeros(2, 3), torch.tensor([0, 3])
    with pytest.raises(lossguard.LossValidationError) as caught:
        lossguard.CrossEntropyLoss()(outputs, targets)
    return caught.value, lossguard.CrossEntropyLoss(), outputs, targets


def test_it_fails_if_a_skipped_batch_left_a_trace(network):
    narrator = demo.Narrator()
    narrator.begin("Title", "Story.")
    narrator.batch_begins(*network)
    network[0][0].bias.data += 1
    with pytest.raises(AssertionError, match="weights or optimizer changed"):
        narrator.batch_skipped(*error_and_batch())


def test_it_fails_if_an_accident_is_not_reported(one_thread):
    torch.manual_seed(0)
    data, narrator = demo.load_digits(), demo.Narrator()
    with lossguard.guard(on_violation="skip"), pytest.raises(AssertionError, match="not reported"):
        demo.a_255_in_a_mask(data, narrator)


def test_native_answer_is_native():
    assert demo.native_answer("CrossEntropyLoss", torch.zeros(2, 3), torch.tensor([0, 7])).startswith("IndexError: ")
    assert demo.native_answer("BCEWithLogitsLoss", torch.zeros(2), torch.tensor([1.0, 5.0])).startswith("nothing; ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "variables, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(variables, coloured, network, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    narrator = demo.Narrator()
    narrator.begin("Title", "Story.")
    narrator.batch_begins(*network)
    narrator.batch_skipped(*error_and_batch())
    text = sys.stdout.getvalue()
    assert ("\033[31m    IndexError: Target 3 is out of bounds.\033[0m" in text) == coloured
    assert ("\033[32m" in text) == coloured
    plain = re.sub(r"\033\[\d*m", "", text)
    assert "\033" not in plain and max(map(len, plain.splitlines())) <= 100
