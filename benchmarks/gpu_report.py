"""The results of a session on a GPU as Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

VERSIONS = ("driver", "torch", "cuda_of_torch", "triton", "python", "cpu")
PASS = {"forward": "fwd", "forward+backward": "fwd+bwd"}

EXPLANATION = """\
Medians in ms, every contender in turn. Copy bandwidth, read and written: {copy:.0f} GB/s. "native /" and "compiled /":
their time over lossguard's. GB/s: useful bytes over lossguard's time; "immediately": over its time with
`when="immediately"`, where each forward waits for its verdict. Without GB/s: many calls in a row, bound by the host.
"""
EMULATED = "Medians in ms of the emulator on this CPU, every contender in turn.\n"


def as_markdown(found: dict[str, Any]) -> str:
    machine = found["machine"]
    if found["dry_run"]:
        title = "DRY RUN of the GPU session: no GPU took part"
        lines = ["Tiny CPU tensors, CUDA kernels run by an emulator. No time here says anything about a GPU.", ""]
    else:
        title, lines = f"lossguard on {machine.get('gpu')}", []
    versions = ", ".join(f"{name.replace('_', ' ')} {machine[name]}" for name in VERSIONS if machine.get(name))
    lines += [f"{found['date']}, commit {found['commit']}, {found['seconds']} s. {versions}.", ""]
    lines += _table(
        ["step", "", "seconds", ""],
        [[s["name"], s["status"], f"{s['seconds']:.1f}", s.get("summary") or s["why"]] for s in found["steps"]],
    )
    records = next(step["records"] for step in found["steps"] if step["name"] == "timings")
    if any("results" in record for record in records):
        lines += ["", "## Timings", "", *_timings(records)]
    return "\n".join([f"# {title}", "", *lines, ""])


def _timings(records: list[Record]) -> list[str]:
    rows = [record for record in records if "results" in record]
    contenders = [*dict.fromkeys(name for row in rows for name in row["results"])]
    copy = next((record["copy_gb_per_s"] for record in records if "copy_gb_per_s" in record), None)

    columns = {
        "case": lambda row: row["title"],
        "pass": lambda row: PASS[row["which"]],
        "useful MB": lambda row: f"{row['useful_bytes'] / 1e6:.1f}",
        **{name: lambda row, name=name: _ms(row["results"].get(name)) for name in contenders},
    }
    if copy is not None:
        for name in ("native", "compiled"):
            columns[f"{name} /"] = lambda row, name=name: _ratio(row["results"], name)
        for name, suffix in (("lossguard", ""), ("immediately", ", immediately")):
            columns[f"GB/s{suffix}"] = lambda row, name=name: _number(row, name, "gb_per_s", "{:.0f}")
            columns[f"of copy{suffix}"] = lambda row, name=name: _number(row, name, "share_of_copy", "{:.0%}")

    lines = (EMULATED if copy is None else EXPLANATION.format(copy=copy)).splitlines()
    lines += ["", *_table([*columns], [[cell(row) for cell in columns.values()] for row in rows])]
    models = dict.fromkeys(f"- {row['loss']}, {PASS[row['which']]}: {row['bytes_model']}" for row in rows)
    lines += ["", "Useful bytes, as sums of whole tensors:", "", *models]
    absent = dict.fromkeys(f"- {record['peer']}: {record['absent']}" for record in records if record.get("absent"))
    skipped = [f"- {record['title']}" for record in records if "skipped" in record]
    failed = [
        f"- {row['title']}, {PASS[row['which']]}, {name}: {result['error'].splitlines()[0]}"
        for row in rows
        for name, result in row["results"].items()
        if "error" in result
    ]
    for heading, said in (("Absent:", absent), ("No time was left for:", skipped), ("Failed:", failed)):
        lines += ["", heading, "", *said] if said else []
    return lines


def _ms(result: Record | None) -> str:
    return "" if result is None else f"{result['ms']:.3f}" if "ms" in result else "failed"


def _ratio(results: dict[str, Record], name: str) -> str:
    theirs, ours = (results.get(contender, {}).get("ms") for contender in (name, "lossguard"))
    return f"{theirs / ours:.2f}x" if theirs and ours else ""


def _number(row: Record, contender: str, name: str, text: str) -> str:
    number = row["results"].get(contender, {}).get(name)
    return "" if number is None else text.format(number)


def _table(heading: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *escaped)]
