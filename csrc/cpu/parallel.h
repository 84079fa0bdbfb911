// The host's thread pool, behind a plain function so that kernels need no framework header.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels.h"

namespace lossguard::cpu {

void parallel_for_impl(int64_t count, void (*body)(int64_t begin, int64_t end, void* context), void* context);

// body(i) for i in [0, count), in parallel. One task alone runs on the calling thread.
template <class F>
inline void for_each_block(int64_t count, const F& body) {
  if (count == 1) return body(int64_t(0));
  parallel_for_impl(
      count,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t i = begin; i < end; ++i) (*static_cast<const F*>(context))(i);
      },
      const_cast<F*>(&body));
}

// body(begin, end) -> Totals over blocks of [0, n), added up in index order. Blocks depend on the
// size alone, so the sum is the same for any number of threads.
template <class F>
inline Totals sum_over_blocks(int64_t n, int64_t block, const F& body) {
  if (n <= block) return n ? body(int64_t(0), n) : Totals{};
  const int64_t blocks = (n + block - 1) / block;
  const std::unique_ptr<Totals[]> partial(new Totals[blocks]);
  for_each_block(blocks, [&](int64_t i) { partial[i] = body(i * block, std::min(n, (i + 1) * block)); });
  Totals totals;
  for (int64_t i = 0; i < blocks; ++i) totals += partial[i];
  return totals;
}

}  // namespace lossguard::cpu
