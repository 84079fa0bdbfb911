"""The vectorised exp, log and log1p of csrc/cpu/simd.h against libm in long double, in ulp of the result."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from lossguard import _C

HEADER = Path(__file__).resolve().parents[1] / "csrc" / "cpu" / "simd.h"
# As setup.py compiles each instruction set.
FLAGS = {"baseline": [], "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]}

DRIVER = r"""
#include LOSSGUARD_SIMD
#include <cmath>
#include <cstdio>
#include <random>
using namespace lossguard::LOSSGUARD_ISA;

template <class T>
long double ulp_of(long double value) {  // the step between the numbers of T around it
  using L = std::numeric_limits<T>;
  const int exponent = value == 0 ? L::min_exponent : std::max(std::ilogb(value) + 1, L::min_exponent);
  return ldexpl(1, exponent - L::digits);
}

// Dense samples of [low, high]: evenly in x, or evenly in log |x| with the sign of low.
template <class T, class F, class R>
void measure(const char* function, F f, R exact, double low, double high, bool in_log, bool last = false) {
  constexpr int lanes = Simd<T>::size;
  std::mt19937_64 generator(1);
  std::uniform_real_distribution<double> unit(0, 1);
  double worst = 0, at = 0;
  for (int i = 0; i < 1000000; i += lanes) {
    T x[lanes], y[lanes];
    for (T& v : x) {
      const double u = unit(generator);
      v = in_log ? T(std::copysign(std::exp(std::log(std::fabs(low)) * (1 - u) + std::log(std::fabs(high)) * u), low))
                 : T(low + (high - low) * u);
    }
    f(Simd<T>::load(x)).store(y);
    for (int k = 0; k < lanes; ++k) {
      const long double want = exact((long double)x[k]);
      const double error = std::fabs(double(((long double)y[k] - want) / ulp_of<T>(want)));
      if (!(error <= worst)) worst = error, at = x[k];
    }
  }
  std::printf("{\"type\": %zu, \"function\": \"%s\", \"low\": %g, \"high\": %g, \"ulp\": %.4f, \"at\": \"%.17g\"},\n",
              sizeof(T), function, low, high, worst, at);
}

template <class T, class F>
void special(const char* function, F f, const std::initializer_list<T>& values) {
  for (T x : values) {
    T lanes[Simd<T>::size], y[Simd<T>::size];
    for (T& v : lanes) v = x;  // in every lane, which must agree
    f(Simd<T>::load(lanes)).store(y);
    for (T v : y)
      std::printf("{\"type\": %zu, \"function\": \"%s\", \"x\": \"%a\", \"y\": \"%a\"},\n", sizeof(T), function,
                  double(x), double(v));
  }
}

template <class T>
void all() {
  using V = Simd<T>;
  using L = std::numeric_limits<T>;
  const auto e = [](V x) { return exp(x); };
  const auto l = [](V x) { return log(x); };
  const auto p = [](V x) { return log1p(x); };
  const auto exact_e = [](long double x) { return expl(x); };
  const auto exact_l = [](long double x) { return logl(x); };
  const auto exact_p = [](long double x) { return log1pl(x); };
  const double lowest = std::log(double(L::min())), tiny = L::denorm_min(), normal = L::min(), huge = L::max();
  const double highest = sizeof(T) == 4 ? 88 : 709;
  measure<T>("exp", e, exact_e, lowest, 0, false);
  measure<T>("exp", e, exact_e, 0, highest, false);
  measure<T>("exp", e, exact_e, -1, 1, false);
  measure<T>("exp", e, exact_e, normal, 1, true);
  measure<T>("exp", e, exact_e, -normal, -1, true);
  measure<T>("log", l, exact_l, 0, 1, false);
  measure<T>("log", l, exact_l, .99, 1.01, false);
  measure<T>("log", l, exact_l, 1, 100, false);
  measure<T>("log", l, exact_l, normal, huge, true);
  measure<T>("log", l, exact_l, 4 * tiny, normal, true);  // subnormal
  measure<T>("log1p", p, exact_p, -1, 0, false);
  measure<T>("log1p", p, exact_p, 0, 1, false);
  measure<T>("log1p", p, exact_p, 1, 100, false);
  measure<T>("log1p", p, exact_p, -normal, -1, true);
  measure<T>("log1p", p, exact_p, normal, huge / 2, true);
  const T inf = L::infinity(), nan = L::quiet_NaN();
  special<T>("exp", e, {T(0), T(-0.), -inf, nan, -nan, T(lowest - 1), -L::max(), L::denorm_min(), -L::denorm_min()});
  special<T>("log", l, {T(0), T(-0.), T(1), inf, -inf, nan, T(-1), -L::denorm_min(), -L::max(), L::denorm_min(),
                        L::min(), L::max()});
  special<T>("log1p", p, {T(0), T(-0.), T(-1), T(-1.5), inf, -inf, nan, L::denorm_min(), -L::denorm_min(), L::min(),
                          L::max(), -L::max()});
}

int main() {
  std::puts("[");
  all<float>();
  all<double>();
  std::puts("null]");
}
"""
BOUNDS = {"exp": 1.5, "log": 1.5, "log1p": 2.0}  # ulp


@pytest.fixture(scope="module", params=_C.cpu_kernels())
def results(request, tmp_path_factory) -> list[dict]:
    """The driver's measurements with the kernels' own compiler flags."""
    directory = tmp_path_factory.mktemp(request.param)
    source, program = directory / "driver.cpp", directory / "driver"
    source.write_text(DRIVER)
    subprocess.run(
        [
            *shlex.split(os.environ.get("CXX", "g++")),
            "-std=c++20",
            "-O3",
            "-ffp-contract=fast",
            *FLAGS[request.param],
            f"-DLOSSGUARD_ISA={request.param}",
            f'-DLOSSGUARD_SIMD="{HEADER}"',
            str(source),
            "-o",
            str(program),
        ],
        check=True,
    )
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return json.loads(output)[:-1]


def test_errors_in_ulp(results):
    measured = [r for r in results if "ulp" in r]
    assert len(measured) == 2 * 15 and {r["function"] for r in measured} == set(BOUNDS)
    beyond = [r for r in measured if not r["ulp"] <= BOUNDS[r["function"]]]
    assert not beyond
    assert all(r["ulp"] >= 0.5 for r in measured if r["low"] == -1)  # it does measure: no result is exact


def limit(function: str, x: float, size: int) -> float | None:
    """The value at a special point; None: like libm's, to a few ulp."""
    if math.isnan(x):
        return math.nan
    if function == "exp":
        lowest = math.log(2.0**-126 if size == 4 else 2.0**-1022)
        return 0.0 if x < lowest else 1.0 if abs(x) < 1e-30 else None
    if function == "log1p":
        if x != 0 and abs(x) < 2.0**-60:
            return x  # whole, subnormal or not
        return limit("log", 1 + x, size) if x in (0, -1, math.inf) or x < -1 else None
    if x < 0:
        return math.nan
    return {0.0: -math.inf, 1.0: 0.0, math.inf: math.inf}.get(x)


def test_special_values(results):
    points = [r for r in results if "x" in r]
    assert len({(r["type"], r["function"], r["x"]) for r in points}) >= 60
    for r in points:
        x, y = (float.fromhex(r[name]) for name in "xy")
        want = limit(r["function"], x, r["type"])
        if want is None:
            want = getattr(math, r["function"])(x)
            assert abs(y - want) <= abs(want) * 2 * 2.0 ** (-23 if r["type"] == 4 else -52), r
        elif math.isnan(want):
            assert math.isnan(y), r
        else:
            assert y == want, r
