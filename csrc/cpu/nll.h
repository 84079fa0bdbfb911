// NLL over rows of log-probabilities: the forward reads one element a row, the backward writes the
// gradient once, tile by tile.
#pragma once
#include "cross_entropy.h"

namespace lossguard::LOSSGUARD_ISA {

// For the backward under check_finite: rows whose own log-probability is not finite become kBad.
template <class A>
void check_picked(const Setup<A>& s, int64_t begin, Rows<A>& rows) {
  s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t r = position + i;
      if (rows.state[r] != Rows<A>::kCounts) continue;
      A x;
      load_run(s.loss.input, offsets[kInputRow] + i * s.space.inner_stride(kInputRow) + rows.label[r] * s.input_stride, 1, 1, &x);
      if (!(x - x == 0)) rows.state[r] = Rows<A>::kBad;
    }
  });
}

// One loop does it all: the loads of many rows are in flight at once, and that is where the time goes.
template <class S, class A>
void add_picked(const Setup<A>& s, const S* input, int64_t begin, int count, A* results, Totals& totals) {
  const RowLoss& a = s.loss;
  const Policy& policy = a.flags.policy;
  const A of_bad = policy.on_violation == OnViolation::raise ? std::numeric_limits<A>::quiet_NaN() : A(0);
  const int64_t stride = s.space.inner_stride(kInputRow), target_stride = s.space.inner_stride(kTargetRow);
  const A* weight = s.weight.empty() ? nullptr : s.weight.data();
  double loss = 0, denominator = 0;
  int64_t bad = 0;
  s.space.walk(begin, count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t t = load_label(a.target, offsets[kTargetRow] + i * target_stride);
      A result(0);
      if (t != a.ignore_index) {
        const bool valid = math::is_class(t, s.classes);
        const A x = valid ? widen<A>(input[offsets[kInputRow] + i * stride + t * s.input_stride]) : A(0);
        if (valid && !(policy.check_finite && !(x - x == 0))) {
          const A w = weight ? weight[t] : A(1);
          result = -w * x;
          denominator += w;
        } else {
          result = of_bad;
          ++bad;
        }
      }
      results[position + i] = result;
      loss += result;
    }
  });
  totals += Totals{loss, denominator, bad};
}

template <class A>
Totals nll_forward(const RowLoss& a, const View& loss) {
  const Setup<A> s(a, loss, View{}, false);
  return cpu::sum_over_blocks(s.space.numel(), 16 * kMaxRows, [&](int64_t block_begin, int64_t block_end) {
    Totals totals;
    A results[kMaxRows];
    for (int64_t begin = block_begin; begin < block_end; begin += kMaxRows) {
      const int n = int(std::min<int64_t>(kMaxRows, block_end - begin));
      switch (a.input.dtype) {
        case DType::f64: add_picked(s, static_cast<const double*>(a.input.data), begin, n, results, totals); break;
        case DType::f16: add_picked(s, static_cast<const Half*>(a.input.data), begin, n, results, totals); break;
        case DType::bf16: add_picked(s, static_cast<const BFloat16*>(a.input.data), begin, n, results, totals); break;
        default: add_picked(s, static_cast<const float*>(a.input.data), begin, n, results, totals);
      }
      if (loss) store_rows(s, loss, kLossRow, begin, n, results);
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
      if (tail[kCheckFinite] != 0) check_picked(s, begin, rows);
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
