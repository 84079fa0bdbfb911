"""Likely causes of a violation. Only what the numbers in the report support is said."""

from __future__ import annotations

from .report import Report, Section

__all__ = ["likely_causes"]


def likely_causes(report: Report) -> list[str]:
    """One sentence per cause, the likeliest first, each with what to do."""
    causes: list[str] = []
    for section in report.sections:
        if section.kind == "class_index":
            causes += _labels(report, section)
        elif section.kind == "finite":
            causes += _not_finite(report, section)
        elif section.tensor == "input":
            causes += _probabilities(section)
        else:
            causes += _soft_targets(report, section)
    return list(dict.fromkeys(causes))[:3]


def _labels(report: Report, s: Section) -> list[str]:
    classes, causes = report.num_classes or 0, []
    highest = s.seen_max
    of_label = s.labels
    above = s.counts.get(">= num_classes", 0) - of_label.get("255", 0)  # 255 has a cause of its own
    assert isinstance(highest, int)
    if classes == 0:
        return ["the model has 0 outputs along the class dimension (dimension 1 of the input)."]
    ignore = report.ignore_index

    def leave_out(label: int) -> str:
        if ignore == -100:  # the default: nobody has chosen one
            return f"pass ignore_index={label}"
        return f"map {label} to {ignore}, the ignore_index of this call,"

    for label, meaning in ((-1, "unlabelled"), (-100, "padding"), (255, "void")):
        n = of_label.get(str(label), 0)
        if n and n == s.count:
            causes.append(
                f"every invalid target is {label}, often used for {meaning} elements: "
                f"{leave_out(label)} if they are to be left out."
            )
    if of_label.get("num_classes", 0) == above > 0:
        if classes == 1:
            causes.append(
                "the model has one output, and labels are 0 and 1: give it two, or use BCEWithLogitsLoss with this one."
            )
        elif s.valid_min == 0:
            causes.append(
                f"the largest label is num_classes, and 0 occurs too: "
                f"the model has one output too few (give it {classes + 1}), or these labels are wrong."
            )
        elif s.valid_min is not None and s.seen >= classes:
            causes.append(
                f"labels look 1-based (they run from {s.valid_min} to {classes}, none is 0): "
                f"subtract 1, or give the model {classes + 1} outputs."
            )
        else:
            causes.append(
                f"labels look 1-based or the model has one output too few (the largest label is num_classes): "
                f"subtract 1, or give the model {classes + 1} outputs."
            )
    elif above and 2 * max(classes, 25) < highest <= 255 and len(report.shapes["target"]) >= 3:
        causes.append(
            f"the target looks like an image mask of grey levels up to {highest}, not of class ids: "
            f"map each grey level to an id in [0, {classes})."
        )
    elif above and highest > 10 * max(classes, 25):
        causes.append(
            f"labels reach {highest} where the model has {classes} outputs: they look like ids of another task, "
            f"vocabulary or annotation file: remap them to [0, {classes}), or resize the output layer."
        )
    elif above and not causes:
        causes.append(
            f"the model has {classes} outputs but labels reach {highest}: give it {highest + 1}, "
            f"or check that these labels belong to this head."
        )
    known = {name: n for name, n in of_label.items() if name in ("-1", "-100", "255")}
    if not causes or sum(known.values()) < s.count:
        for name, n in known.items():
            they_are = "targets are" if n > 1 else "target is"
            cause = f"{n} {they_are} {name}: {leave_out(int(name))} if that marks ignored elements."
            if not any(f"every invalid target is {name}" in c for c in causes):
                causes.append(cause)
    if not causes and s.counts.get("below 0", 0):
        causes.append("negative labels: uninitialised memory, an overflow, or a marker that ignore_index should name.")
    return causes


def _probabilities(s: Section) -> list[str]:
    nan, beyond = s.counts.get("NaN", 0), s.count - s.counts.get("NaN", 0)
    causes = []
    if beyond:
        assert s.min is not None and s.max is not None
        if s.min < -0.01 or s.max > 1.01:
            causes.append(
                "the input looks like logits, not probabilities: use BCEWithLogitsLoss, or apply torch.sigmoid first."
            )
        else:
            causes.append(
                "probabilities just outside [0, 1], from rounding: clamp them with input.clamp(0, 1), "
                "or use BCEWithLogitsLoss on the logits."
            )
    if nan:
        where = "every element" if nan == s.seen else f"{nan} of {s.seen} elements"
        data = "" if nan == s.seen else "missing values or a division by zero in these samples, or "
        causes.append(
            f"NaN in the input ({where}): {data}the model diverged upstream of the loss "
            "(lower the learning rate, clip gradients; torch.autograd.set_detect_anomaly(True) finds the operation)."
        )
    return causes


def _soft_targets(report: Report, s: Section) -> list[str]:
    causes = []
    low, high = s.seen_min, s.seen_max
    if s.counts.get("NaN", 0):
        causes.append("NaN in the target: look for a division by zero or a missing value in the data.")
    if low is None or high is None or s.count == s.counts.get("NaN", 0):
        return causes
    if max(abs(low), abs(high)) == float("inf"):
        return causes
    whole = all(float(v).is_integer() for v in s.values if v == v)
    if 100 < high <= 255 and low >= 0:
        causes.append(f"the target reaches {high:g}, as images of scale 255 do: divide it by 255.")
    elif high > 1 and low >= 0 and whole:
        other = "CrossEntropyLoss with int64 targets" if report.loss != "CrossEntropyLoss" else "an int64 target"
        causes.append(
            f"the target holds class ids up to {high:g}, not probabilities: use {other}, or one-hot encode it."
        )
    elif low == -1 and high <= 1 and whole:
        causes.append("-1 in the target: labels in {-1, 1} become (target + 1) / 2; ignored elements get weight 0.")
    elif low < 0:
        causes.append(
            "negative targets: they look like logits, log-probabilities or normalised values, not probabilities."
        )
    return causes


def _not_finite(report: Report, s: Section) -> list[str]:
    if report.loss == "NLLLoss" and s.counts.get("-inf", 0) == s.count:
        return [
            "log-probabilities of -inf: log of a probability of 0; use log_softmax, or CrossEntropyLoss on the logits."
        ]
    causes = []
    if report.dtypes["input"] == "float16" and s.counts.get("+inf", 0):
        causes.append("float16 overflows above 65504: compute the logits in bfloat16 or float32.")
    if s.counts.get("NaN", 0) or s.counts.get("+inf", 0):
        causes.append(
            "the model diverged upstream of the loss (lower the learning rate, clip gradients; "
            "torch.autograd.set_detect_anomaly(True) finds the operation)."
        )
    elif report.loss == "CrossEntropyLoss" and s.counts.get("-inf", 0):
        causes.append("every class of a row is masked with -inf: leave one, or set the row's target to ignore_index.")
    return causes
