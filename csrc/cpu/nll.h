// NLL over rows of log-probabilities: the forward reads one element a row, the backward writes the
// gradient once, tile by tile.
#pragma once
#include "cross_entropy.h"

namespace lossguard::LOSSGUARD_ISA {

template <class S, class A>
LG_HD void gather(const S* from, const int64_t* offset, int n, A* to) {
  for (int r = 0; r < n; ++r) to[r] = widen<A>(from[offset[r]]);
}

// The log-probability at each row's label; rows whose check failed become kBad.
template <class A>
void load_picked(const Setup<A>& s, bool check_finite, int64_t begin, Rows<A>& rows) {
  const View& input = s.loss.input;
  const int64_t stride = s.space.inner_stride(kInputRow);
  if (!s.classes) return;
  int64_t at[kMaxRows];
  s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    for (int64_t i = 0; i < length; ++i)  // class 0 for rows without a label
      at[position + i] = offsets[kInputRow] + i * stride + std::max<int64_t>(rows.label[position + i], 0) * s.input_stride;
  });
  switch (input.dtype) {
    case DType::f64: gather(static_cast<const double*>(input.data), at, rows.count, rows.x_label); break;
    case DType::f16: gather(static_cast<const Half*>(input.data), at, rows.count, rows.x_label); break;
    case DType::bf16: gather(static_cast<const BFloat16*>(input.data), at, rows.count, rows.x_label); break;
    default: gather(static_cast<const float*>(input.data), at, rows.count, rows.x_label);
  }
  if (check_finite)
    for (int r = 0; r < rows.count; ++r)
      if (rows.state[r] == Rows<A>::kCounts && !(rows.x_label[r] - rows.x_label[r] == 0)) rows.state[r] = Rows<A>::kBad;
}

template <class A>
Totals nll_forward(const RowLoss& a, const View& loss) {
  const Setup<A> s(a, loss, View{}, false);
  const Policy& policy = a.flags.policy;
  const A of_bad = policy.on_violation == OnViolation::raise ? std::numeric_limits<A>::quiet_NaN() : A(0);
  return cpu::sum_over_blocks(s.space.numel(), 16 * kMaxRows, [&](int64_t block_begin, int64_t block_end) {
    Totals totals;
    Rows<A> rows;
    for (int64_t begin = block_begin; begin < block_end; begin += kMaxRows) {
      rows.start(int(std::min<int64_t>(kMaxRows, block_end - begin)));
      load_labels(s, begin, rows);
      load_picked(s, policy.check_finite, begin, rows);
      for (int r = 0; r < rows.count; ++r) {
        const bool counts = rows.state[r] == Rows<A>::kCounts, bad = rows.state[r] == Rows<A>::kBad;
        rows.result[r] = counts ? -rows.w_label[r] * rows.x_label[r] : bad ? of_bad : A(0);
        totals.bad += bad;
        totals.denominator += counts ? rows.w_label[r] : A(0);
        totals.loss += rows.result[r];
      }
      if (loss) store_rows(s, loss, kLossRow, begin, rows.count, rows.result);
    }
    return totals;
  });
}

template <class A>
void nll_backward(const RowLoss& a, const View& grad, const View& out) {
  const Setup<A> s(a, grad, out, false);
  A tail[kSavedTail];
  load_run(a.saved, 0, 1, kSavedTail, tail);
  const A denominator = a.flags.reduction == Reduction::mean ? tail[kDenominator] : A(1);
  const int at_a_time = s.rows_at_a_time();
  const int64_t n = s.space.numel(), block = s.rows_per_block();
  if (!n || !s.classes) return;
  cpu::for_each_block((n + block - 1) / block, [&](int64_t index) {
    Rows<A> rows;
    std::fill_n(rows.chunk, kChunk, A(0));
    const int64_t stride = s.space.inner_stride(kGradRow), block_end = std::min(n, (index + 1) * block);
    for (int64_t begin = index * block; begin < block_end; begin += at_a_time) {
      rows.start(int(std::min<int64_t>(at_a_time, block_end - begin)));
      load_labels(s, begin, rows);
      if (tail[kCheckFinite] != 0) load_picked(s, true, begin, rows);
      load_rows(s, grad, kLossRow, begin, rows.count, rows.result);
      for (int r = 0; r < rows.count; ++r) rows.result[r] = -rows.w_label[r] * (rows.result[r] / denominator);
      s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
        const int64_t to = offsets[kGradRow];
        if (s.grad_stride == 1) {
          for (int64_t i = 0; i < length; ++i)
            for (int64_t c = 0; c < s.classes; c += kChunk)
              store_run(out, to + i * stride + c, 1, std::min<int64_t>(kChunk, s.classes - c), rows.chunk);
        } else {
          for (int64_t c = 0; c < s.classes; ++c) store_run(out, to + c * s.grad_stride, stride, length, rows.chunk);
        }
        for (int64_t i = 0; i < length; ++i) {
          const int64_t r = position + i;
          if (rows.state[r] == Rows<A>::kCounts)
            store_run(out, to + i * stride + rows.label[r] * s.grad_stride, 1, 1, rows.result + r);
        }
      });
    }
  });
}

}  // namespace lossguard::LOSSGUARD_ISA
