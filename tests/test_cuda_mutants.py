"""The emulator's tests would notice: bugs of the kind that kernels have, put into copies of the real sources, are each
caught by the means that is there for it, at the line where it is.

Every mutant replaces a text that occurs once. The sources without a mutation, copied and built in the same way, pass
the same runs."""

import dataclasses
import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
from test_cuda_emulator import EMULATOR, build, text_of
from test_cuda_sanitizers import CSRC, assert_clean, run


def regime(name, dtype="float32"):
    return ("regimes", "--dtypes", dtype, "--schedules", "random", name)


ROWS = regime("short rows, odd")


# ---- by what a mutant is caught, and the build that has it


@dataclasses.dataclass(frozen=True)
class Race:
    """TSan names two accesses: lines that have these texts."""

    first: str
    second: str
    variant = "tsan"

    def caught(self, result, executable):
        for report in result.stderr.split("WARNING: ThreadSanitizer: data race")[1:]:
            stacks = re.findall(
                r"^  (?:Previous )?(?:atomic )?(?:read|write) of size .*\n((?:    #.*\n)*)", report, re.M | re.I
            )
            one, other = (innermost(stack, executable) for stack in stacks)
            if (self.first in one and self.second in other) or (self.first in other and self.second in one):
                return True
        return False


@dataclasses.dataclass(frozen=True)
class OutOfBounds:
    """ASan names the line: an access beyond a tensor or shared memory, or to no memory at all."""

    error: str
    line: str
    variant = "asan"

    def caught(self, result, executable):
        report = re.search(rf"ERROR: AddressSanitizer: {self.error}.*\n(?:[^ ].*\n)*((?:    #.*\n)+)", result.stderr)
        return report and self.line in innermost(report[1], executable)


@dataclasses.dataclass(frozen=True)
class Undefined:
    """UBSan names the line, and says this."""

    error: str
    line: str
    variant = "asan"

    def caught(self, result, executable):
        report = re.search(rf"^(.*):(\d+):\d+: runtime error: {self.error}", result.stderr, re.M)
        return report and self.line in text_at(*report.groups())


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The driver says that a result is wrong, or that a launch failed, in the plain build."""

    message: str
    variant = "plain"

    def caught(self, result, executable):
        return result.returncode == 1 and re.search(self.message, result.stdout)


def innermost(stack, executable):
    """The top of a stack: the function, the line of code and those into which it is inlined.

    The sanitizers' own symbolizer loses its way where objects have different versions of a template.
    """
    top = stack.partition("\n")[0]
    address = re.search(rf"\((?:\S*/)?{re.escape(executable.name)}\+0x([0-9a-f]+)\)", top)
    if not address:
        return top
    before = f"{int(address[1], 16) - 1:x}"  # what is on a stack is where a call returns to
    command = ["addr2line", "--inlines", "--exe", executable, before]
    places = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join([top] + [text_at(*place) for place in re.findall(rf"^({build().ROOT}/.*):(\d+)", places, re.M)])


def text_at(path, number):
    return Path(path).read_text().splitlines()[int(number) - 1]


# ---- the mutants


@dataclasses.dataclass(frozen=True)
class Mutant:
    source: str  # the .cu file that has it
    run: tuple[str, ...]
    file: str
    text: str
    replacement: str
    caught_by: Race | OutOfBounds | Undefined | Wrong
    more: tuple[tuple[str, str], ...] = ()  # texts of the same file and their replacements


MUTANTS = {
    # Barriers.
    "sums of warps added up before they are there": Mutant(
        "nll",
        ROWS,
        "finish.h",
        "  __syncthreads();\n  if (threadIdx.x == 0) {\n#pragma unroll 1\n    for (int w = 1; w < kWarps",
        "  if (threadIdx.x == 0) {\n#pragma unroll 1\n    for (int w = 1; w < kWarps",
        Race("s.partials[warp_id()] = p", "a.loss += b.loss"),
    ),
    "rows read before the tile is there": Mutant(
        "cross_entropy_f32",
        ROWS,
        "cross_entropy_flat.h",
        "    __syncthreads();\n    unsigned bad = 0;\n    if (inside) {",
        "    unsigned bad = 0;\n    if (inside) {",
        Race("*reinterpret_cast<uint4*>(p) = ", "top = math::max(widen<A>(x[c]), top)"),
    ),
    "warps voting where the block should": Mutant(
        "cross_entropy_f64",
        regime("a block a row, twice over it", "float64"),
        "cross_entropy_rows.h",
        "row.bad_target = __syncthreads_or(row.bad_target);",
        "row.bad_target = __any_sync(kAllLanes, row.bad_target);",
        Race("warps.sums[warp_id()] = row.sums", "row.sums.combine(warps.sums[w])"),
    ),
    "a barrier that not all threads reach": Mutant(
        "nll",
        ROWS,
        "nll.h",
        "    __syncthreads();\n    T* const to =",
        "    if (threadIdx.x < rows) __syncthreads();\n    T* const to =",
        Wrong(r"emulator: block \d+ thread \d+: __syncthreads\(\) at nll\.h:\d+ while others wait at nll\.h:\d+"),
    ),
    # Within a warp.
    "a record read before it is there": Mutant(
        "nll",
        ROWS,
        "violations.h",
        "  if (first) Offenders<V>().store(r);\n  __syncwarp();",
        "  if (first) Offenders<V>().store(r);",
        Race("r.index[lane_id()] = index", "last_listed = r.index[kListed - 1]"),
    ),
    "a section counted before all lanes wrote theirs": Mutant(
        "nll",
        ROWS,
        "finish.h",
        "    __syncwarp();\n    if (lane == 0) ++report.count;",
        "    if (lane == 0) ++report.count;",
        Race("++report.count", "report.sections[report.count]"),
    ),
    # Between blocks.
    "a ticket without a fence before it": Mutant(
        "nll",
        ROWS,
        "finish.h",
        "    __threadfence();\n    s.last = ",
        "    s.last = ",
        Race("to.partials[part] = s->partials[0]", "a.loss += b.loss"),
    ),
    "a ticket without a fence behind it": Mutant(
        "nll",
        ROWS,
        "finish.h",
        "  if (s.last) __threadfence();\n",
        "",
        Race("to.partials[part] = s->partials[0]", "a.loss += b.loss"),
    ),
    "a ticket that is not put back": Mutant(
        "nll",
        ROWS,
        "finish.h",
        "    *f.scratch.ticket = 0;\n",
        "",
        Wrong("the policy was not saved"),
    ),
    # Addresses.
    "the last pack reads beyond the tensor": Mutant(
        "elementwise",
        regime("elements, a pack and one"),
        "elementwise.h",
        "    count = (n - head) / size;",
        "    count = (n - head + size - 1) / size;",
        OutOfBounds("heap-buffer-overflow", "x[u] = load_pack("),
    ),
    "the last element is left out": Mutant(
        "nll",
        ROWS,
        "nll.h",
        "    if (single < n) {",
        "    if (single < n - 1) {",
        Wrong("gradient 1279 is -?nan and should be"),
    ),
    "shared memory for a thread too few": Mutant(
        "nll",
        ROWS,
        "nll.h",
        "  Spike<A> of_row[kThreads];",
        "  Spike<A> of_row[kThreads - 1];",
        OutOfBounds("heap-buffer-overflow", "spikes.of_row[threadIdx.x] = spike_of("),
    ),
    "a label that is an address unchecked": Mutant(
        "nll",
        ROWS,
        "nll.h",
        "      if (state == kSound) x = r.input.load<A>(",
        "      if (state != kIgnored) x = r.input.load<A>(",
        OutOfBounds("heap-buffer-overflow", "if (state != kIgnored) x = "),
    ),
    "an offset of 32 bits": Mutant(
        "nll",
        regime("rows far apart"),
        "layout.h",
        "at[k] += rest * strides[k][0];",
        "at[k] += int32_t(rest * strides[k][0]);",
        OutOfBounds("SEGV", "x = r.input.load<A>("),
    ),
    # Undefined behaviour.
    "a shift by all bits": Mutant(
        "cross_entropy_f32",
        regime("32 lanes a row"),
        "cross_entropy.h",
        "for (int j = 0; __any_sync(kAllLanes, bad); ++j, bad >>= 1) {",
        "for (int j = 0; __any_sync(kAllLanes, bad >> j); ++j) {",
        Undefined("shift exponent 32 is too large for 32-bit type", "__any_sync(kAllLanes, bad >> j)"),
        more=(("    if (bad & 1) {", "    if (bad >> j & 1) {"),),
    ),
    "an index of nothing multiplied": Mutant(
        "nll",
        regime("pixels, offset"),  # of a shape that INT64_MAX is no index in
        "finish.h",
        "!of_target && f.classes && lane < listed;",
        "!of_target && f.classes;",
        Undefined("signed integer overflow", "return (row / inner * classes + c) * inner + row % inner"),
    ),
    # The mail.
    "a flag before what it announces": Mutant(
        "nll",
        ("streams", "watched"),
        "finish.h",
        "  } else {\n    if (s->partials[0].target_bad) write_section",
        "  } else {\n    LG_STORE_SYSTEM(&f.mail->flag, 1);\n    if (s->partials[0].target_bad) write_section",
        Wrong(r"watched, seed 1: "),
    ),
    "a flag without a fence before it": Mutant(
        "nll",
        ("streams", "watched"),
        "finish.h",
        "    __threadfence_system();\n    __syncthreads();\n    if (threadIdx.x == 0) {\n      __threadfence_system();",
        "    __syncthreads();\n    if (threadIdx.x == 0) {",
        Wrong(r"watched, seed 1: "),
    ),
    # The host's side.
    "a workspace that is freed at once": Mutant(
        "runtime",
        ("streams", "in flight"),
        "runtime.cu",
        "  added.scratch = parts.in(memory);\n",
        "  added.scratch = parts.in(memory);\n  LG_CUDA(cudaFree, memory);\n",
        OutOfBounds("heap-use-after-free", ""),
    ),
    "a slot taken back before its launch is over": Mutant(
        "runtime",
        ("streams", "host threads", "3"),
        "runtime.cu",
        "query && LG_CUDA(cudaEventQuery, slot.event) != cudaErrorNotReady",
        "query",
        Wrong(r"report, seed \d+: number of tensors in the report is 0 and should be [12]"),
        more=(("words(LG_CUDA(cudaEventSynchronize, slot.event))", "words(cudaSuccess)"),),
    ),
    "a report that is not waited for": Mutant(
        "runtime",
        ("streams", "host threads", "3"),
        "runtime.cu",
        "words(LG_CUDA(cudaEventSynchronize, slot.event))",
        "words(cudaSuccess)",
        Wrong(r"report, seed \d+: number of tensors in the report is 0 and should be [12]"),
    ),
    "a mailbox for two": Mutant(
        "runtime",
        ("streams", "host threads", "3"),
        "runtime.cu",
        "  d.free.pop_back();\n  __atomic",
        "  __atomic",
        Wrong(r"report, seed \d+: "),
    ),
    "a workspace for all streams": Mutant(
        "runtime",
        ("streams", "in flight"),
        "runtime.cu",
        "d->streams.find(place.stream)",
        "d->streams.find(nullptr)",
        Race("to.partials[part] = s->partials[0]", "to.partials[part] = s->partials[0]"),
        more=(("d.streams.emplace(place.stream, added)", "d.streams.emplace(nullptr, added)"),),
    ),
    "a graph whose ticket is not cleared": Mutant(
        "runtime",
        ("streams", "replayed"),
        "runtime.cu",
        "LG_CUDA(cudaMemsetAsync, workspace.scratch.ticket, 0, sizeof(unsigned), stream_of(place))",
        "cudaSuccess",
        Wrong(r"replayed, seed 1: "),
    ),
    "a capture in which a kernel is loaded": Mutant(
        "runtime",
        ("streams", "replayed"),
        "runtime.cu",
        "words(LG_CUDA(cudaFuncGetAttributes, &attributes, kernel))",
        "words((static_cast<void>(attributes), static_cast<void>(kernel), cudaSuccess))",
        Wrong(r"forward, seed 1: .*a kernel that is not loaded yet is being captured"),
    ),
    "a capture in which memory is allocated": Mutant(
        "runtime",
        ("streams", "replayed"),
        "runtime.cu",
        "    if (needed_) LG_CUDA(cudaThreadExchangeStreamCaptureMode, &mode_);",
        "",
        Wrong(r"forward, seed 1: .*not allowed while a stream is capturing"),
    ),
    "a workspace cleared in another stream": Mutant(
        "runtime",
        ("streams", "in flight"),
        "runtime.cu",
        "LG_CUDA(cudaMemsetAsync, memory, 0, size, stream)",
        "LG_CUDA(cudaMemsetAsync, memory, 0, size, nullptr)",
        Race("*f.scratch.ticket = 0;", "#0 memset"),
    ),
}


# ---- building and running them

REAL_SOURCES = sorted((CSRC / "cuda").glob("*.cu"))
CLEAN = "clean"


def slug(name):
    return name.replace(" ", "-")


def copy_of_csrc(name, edits=None):
    """A copy of csrc in which `edits` has another text for some files. Files that are as they should be stay so."""
    copy = build().BUILD / "mutants" / slug(name) / "csrc"
    for path in CSRC.rglob("*"):
        if path.suffix not in (".h", ".cu", ".cpp"):
            continue
        text = (edits or {}).get(path, path.read_text())
        target = copy / path.relative_to(CSRC)
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}")  # another worker may be compiling it
            partial.write_text(text)
            partial.replace(target)
    return copy


def edits_of(mutant):
    path = CSRC / "cuda" / mutant.file
    text = path.read_text()
    for old, new in ((mutant.text, mutant.replacement), *mutant.more):
        assert text.count(old) == 1, f"{mutant.file} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return {path: text}


def linked(driver, copies):
    """The sources of a driver, those of `copies` instead of the real ones and first: their templates are the linked."""
    real = [path for path in REAL_SOURCES if path.stem not in copies]
    copied = [(copy / f"cuda/{stem}.cu", copy) for stem, copy in copies.items()]
    return [*copied, *real, EMULATOR / f"drivers/{driver}.cpp"]


@functools.cache
def executables(variant):
    """By name: the mutants of a variant, and for each driver a clean copy of all that they have mutated."""
    mutants = {name: mutant for name, mutant in MUTANTS.items() if mutant.caught_by.variant == variant}
    wanted = {}
    for name, mutant in mutants.items():
        wanted[name] = linked(mutant.run[0], {mutant.source: copy_of_csrc(name, edits_of(mutant))})
    clean = dict.fromkeys((mutant.source for mutant in mutants.values()), copy_of_csrc(CLEAN))
    for driver in {mutant.run[0] for mutant in mutants.values()}:
        wanted[f"{CLEAN} {driver}"] = linked(driver, clean)
    built = build().drivers({f"mutants/{slug(name)}": sources for name, sources in wanted.items()}, variant)
    return dict(zip(wanted, built.values()))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    mutant = MUTANTS[name]
    executable = executables(mutant.caught_by.variant)[name]
    result = run(executable, *mutant.run[1:])
    assert result.returncode != 0 and mutant.caught_by.caught(result, executable), text_of(result)


@pytest.mark.parametrize("variant", sorted({mutant.caught_by.variant for mutant in MUTANTS.values()}))
def test_clean_copy_passes(variant):
    for arguments in {mutant.run for mutant in MUTANTS.values() if mutant.caught_by.variant == variant}:
        assert_clean(run(executables(variant)[f"{CLEAN} {arguments[0]}"], *arguments[1:]))
