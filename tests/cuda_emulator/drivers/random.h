// A generator that is the same everywhere.
#pragma once
#include <cstdint>

namespace drivers {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  double between(double low, double high) { return low + (high - low) * double(next() >> 11) * 0x1p-53; }
  template <class T, int n>
  T pick(const T (&choices)[n]) {
    return choices[below(n)];
  }

 private:
  uint64_t state_;
};

}  // namespace drivers
