// Cross-entropy over rows of logits, for class labels and class probabilities.
//
// Two ways through memory. Where the classes of a row lie next to each other and are many, a vector
// holds neighbouring classes of one row (`RowWise`). Else it holds one class of neighbouring rows
// (`LaneWise`): the pixels of an image, or short rows turned on the way into L1. Both go over chunks
// of classes with a running maximum, so that memory is read once whatever the number of classes.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "../math/check.h"
#include "../math/cross_entropy.h"
#include "convert.h"
#include "elementwise.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"
#include "../space.h"

namespace lossguard::LOSSGUARD_ISA {

constexpr int kMaxRows = 256;       // rows worked on at a time
constexpr int kChunk = 8192;        // logits of those rows held in L1
constexpr int kRowWiseClasses = 48; // from here on a vector runs along a row
constexpr int64_t kBlockLogits = 1 << 16;

template <class A>
constexpr A kBadMass = -std::numeric_limits<A>::infinity();  // RowLoss::saves_mass

enum class Spread { none, labels, probabilities };  // what besides the label's own logit a row's loss reads

// The operands that have one element a row.
enum RowOperand { kInputRow, kTargetRow, kLossRow, kLseRow, kGradRow, kRowOperands };
using RowSpace = Space<kRowOperands>;

// What is constant over a call.
template <class A>
struct Setup {
  const RowLoss& loss;
  const View input_rows, target_rows, lse_rows, grad_rows, saved_mass;
  const RowSpace space;
  const int64_t classes, input_stride, target_stride, grad_stride;  // strides between classes
  const A smoothing, spread;  // e and e/C
  std::vector<A> weight;      // (C), ones where absent; a vector of zeros behind
  A weight_sum = 0;
  std::vector<A> mass_up_to;  // of the weights, at each multiple of kChunk classes
  const bool row_wise;
  const bool check_target;  // class probabilities; labels always are
  const math::UnitBounds<A> bounds;

  // per_row: the loss or its gradient by row; grad: like the input.
  Setup(const RowLoss& a, const View& per_row, const View& grad, bool strict)
      : loss(a),
        input_rows(a.input.without_dim(a.class_dim)),
        target_rows(a.probabilities ? a.target.without_dim(a.class_dim) : a.target),
        lse_rows(input_rows.dense_over(a.saved)),
        grad_rows(grad ? grad.without_dim(a.class_dim) : grad),
        saved_mass(behind(a.saved, input_rows.numel())),
        space(make_space(per_row)),
        classes(a.classes()),
        input_stride(a.input.strides[a.class_dim]),
        target_stride(a.probabilities ? a.target.strides[a.class_dim] : 0),
        grad_stride(grad ? grad.strides[a.class_dim] : 0),
        smoothing(A(a.smoothing)),
        spread(classes ? A(a.smoothing / double(classes)) : A(0)),
        row_wise(input_stride == 1 && classes >= kRowWiseClasses),
        check_target(strict && a.probabilities),
        bounds(math::tolerant_unit_bounds<A>(epsilon_of(a.target.dtype))) {
    if (!a.weight && !a.probabilities && a.smoothing == 0) return;
    weight.assign(classes + Simd<A>::size, A(0));
    if (a.weight)
      load_run(a.weight, 0, a.weight.strides[0], classes, weight.data());
    else
      std::fill_n(weight.begin(), classes, A(1));
    double sum = 0;
    for (int64_t c = 0; c < classes; ++c) {
      if (c % kChunk == 0) mass_up_to.push_back(A(sum));
      sum += weight[c];
    }
    mass_up_to.push_back(weight_sum = A(sum));
  }
  Setup(const Setup&) = delete;

  int rows_at_a_time() const {
    const int64_t fit = kChunk / std::max<int64_t>(classes, 1);
    if (row_wise) return int(std::clamp<int64_t>(fit, 1, 64));
    return int(std::clamp<int64_t>(fit / 16 * 16, 16, kMaxRows));
  }
  // A multiple of rows_at_a_time.
  int64_t rows_per_block() const {
    const int64_t rows = rows_at_a_time();
    return rows * std::max<int64_t>(1, kBlockLogits / (rows * std::max<int64_t>(classes, 1)));
  }
  A weight_of(int64_t label) const { return weight.empty() ? A(1) : weight[label]; }

 private:
  static View behind(View v, int64_t n) {
    v.data = static_cast<A*>(v.data) + n;
    return v;
  }
  RowSpace make_space(const View& per_row) const {
    const View* const views[] = {&input_rows, &target_rows, &per_row, &lse_rows, &grad_rows};
    return RowSpace(views, Order::memory);
  }
};

// The state of the rows being worked on. `safe` is the running maximum m, or 0 while m is -inf.
template <class A>
struct Rows {
  enum : uint8_t { kCounts, kIgnored, kBad };
  int count;
  uint8_t state[kMaxRows];
  int64_t label[kMaxRows];
  alignas(64) A max[kMaxRows], safe[kMaxRows], sum[kMaxRows];  // sum of exp(x - m)
  alignas(64) A mass[kMaxRows], moment[kMaxRows];              // see math/cross_entropy.h
  alignas(64) A x_label[kMaxRows], w_label[kMaxRows];
  alignas(64) A lse[kMaxRows], result[kMaxRows];
  alignas(64) A chunk[kChunk + 64], target_chunk[kChunk + 64];
  alignas(64) A turning[kChunk + 64];  // rows on their way into lanes, or back

  void start(int n) {
    count = n;
    for (int r = 0; r < n; ++r) state[r] = kCounts;
  }
  void clear_sums() {  // of `count` rows, rounded up to whole vectors
    for (int r = 0; r < count + Simd<A>::size && r < kMaxRows; ++r) {
      max[r] = -std::numeric_limits<A>::infinity();
      safe[r] = sum[r] = mass[r] = moment[r] = x_label[r] = w_label[r] = A(0);
    }
  }
};

// Labels that do not count become -1, so that none of them is ever an address.
template <class A>
void load_labels(const Setup<A>& s, int64_t begin, Rows<A>& rows) {
  const RowLoss& a = s.loss;
  s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    load_label_run(a.target, offsets[kTargetRow], s.space.inner_stride(kTargetRow), length, rows.label + position);
  });
  for (int r = 0; r < rows.count; ++r) {
    const int64_t t = rows.label[r];
    const bool ignored = t == a.ignore_index, valid = math::is_class(t, s.classes);
    rows.state[r] = ignored ? Rows<A>::kIgnored : valid ? Rows<A>::kCounts : Rows<A>::kBad;
    rows.label[r] = valid & !ignored ? t : -1;
  }
  if (s.weight.empty())
    for (int r = 0; r < rows.count; ++r) rows.w_label[r] = A(rows.label[r] >= 0);
  else
    for (int r = 0; r < rows.count; ++r) rows.w_label[r] = rows.label[r] >= 0 ? s.weight[rows.label[r]] : A(0);
}

template <class A>
LG_HD Simd<A> finite_or_zero(Simd<A> m) {
  return select(m == Simd<A>(-std::numeric_limits<A>::infinity()), Simd<A>(0), m);
}

// ---- a vector runs along a row

template <class A>
const A* load_row(const View& v, int64_t offset, int64_t stride, int64_t n, A* buffer) {
  if (A* p = in_place<A>(v, offset, stride)) return p;
  load_run(v, offset, stride, n, buffer);
  return buffer;
}
// The last, partial vector of a row.
template <class A>
LG_HD Simd<A> load_tail(const A* from, int64_t n, A pad) {
  A lanes[Simd<A>::size];
  for (int i = 0; i < Simd<A>::size; ++i) lanes[i] = i < n ? from[i] : pad;
  return Simd<A>::load(lanes);
}

template <class A, Spread kSpread>
struct RowSums {
  using V = Simd<A>;
  V sum{0}, mass{0}, moment{0};
  Mask<A> bad{};

  LG_HD_MEMBER void add(V x, V m, V q, V w, const Setup<A>& s) {
    const V shifted = x - m;
    sum = sum + exp(shifted);
    if constexpr (kSpread == Spread::labels) {
      moment = moment + math::moment_term(w, shifted);
    } else if constexpr (kSpread == Spread::probabilities) {
      bad = bad | !(math::in_unit_interval(q, s.bounds) | (w == V(0)));
      const V v = math::smoothed(q, w, V(A(1) - s.smoothing), V(s.spread));
      mass = mass + v;
      moment = moment + math::moment_term(v, shifted);
    }
  }
};

template <class A>
A max_of_row(const A* x, int64_t n) {
  using V = Simd<A>;
  const A lowest = -std::numeric_limits<A>::infinity();
  V m0(lowest), m1(lowest), m2(lowest), m3(lowest);
  int64_t i = 0;
  for (; i + 4 * V::size <= n; i += 4 * V::size) {
    m0 = max(V::load(x + i), m0);
    m1 = max(V::load(x + i + V::size), m1);
    m2 = max(V::load(x + i + 2 * V::size), m2);
    m3 = max(V::load(x + i + 3 * V::size), m3);
  }
  for (; i + V::size <= n; i += V::size) m0 = max(V::load(x + i), m0);
  if (i < n) m1 = max(load_tail(x + i, n - i, lowest), m1);
  return max_of(max(max(m0, m1), max(m2, m3)));
}

template <class A, Spread kSpread>
void add_row_wise(const Setup<A>& s, int r, int64_t input_offset, int64_t target_offset, Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  for (int64_t c = 0; c < s.classes; c += kChunk) {
    const int64_t n = std::min<int64_t>(kChunk, s.classes - c);
    const A* x = load_row(a.input, input_offset + c, int64_t(1), n, rows.chunk);
    const A* q = kSpread == Spread::probabilities
                     ? load_row(a.target, target_offset + c * s.target_stride, s.target_stride, n, rows.target_chunk)
                     : x;
    const A* w = kSpread != Spread::none ? s.weight.data() + c : x;
    if (rows.label[r] >= c && rows.label[r] < c + n) rows.x_label[r] = x[rows.label[r] - c];

    const A m = std::max(rows.max[r], max_of_row(x, n));
    const A safe = m == -std::numeric_limits<A>::infinity() ? A(0) : m;
    RowSums<A, kSpread> sums;
    int64_t i = 0;
    for (; i + V::size <= n; i += V::size)
      sums.add(V::load(x + i), V(safe), V::load(q + i), V::load(w + i), s);
    if (i < n) {
      const int64_t rest = n - i;
      sums.add(load_tail(x + i, rest, -std::numeric_limits<A>::infinity()), V(safe), load_tail(q + i, rest, A(0)),
               load_tail(w + i, rest, A(0)), s);
    }
    if (c) {  // what came before was relative to a smaller maximum; masks of -inf alone summed to 0
      if (rows.sum[r] != 0) rows.sum[r] *= math::exp(rows.safe[r] - safe);
      rows.moment[r] += math::moment_term(rows.mass[r], rows.safe[r] - safe);
    }
    rows.sum[r] += sum(sums.sum);
    rows.moment[r] += sum(sums.moment);
    if (kSpread == Spread::probabilities) {
      rows.mass[r] += sum(sums.mass);
      if (s.check_target && any(sums.bad)) rows.state[r] = Rows<A>::kBad;
    } else if (kSpread == Spread::labels) {
      rows.mass[r] = s.mass_up_to[c / kChunk + 1];
    }
    rows.max[r] = m;
    rows.safe[r] = safe;
  }
}

// ---- a vector runs across rows

// to[j][i] = from[i][j] for an m x n matrix, in squares of vectors; the last ones overlap.
template <class A>
void transpose_matrix(const A* from, int64_t from_stride, int64_t m, int64_t n, A* to, int64_t to_stride) {
  constexpr int size = Simd<A>::size;
  if (m < size || n < size) {
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) to[j * to_stride + i] = from[i * from_stride + j];
    return;
  }
  for (int64_t i = 0; i < m; i += size) {
    const int64_t row = std::min(i, m - size);
    for (int64_t j = 0; j < n; j += size) {
      const int64_t column = std::min(j, n - size);
      transpose(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
    }
  }
}

// Classes [c, c + n) of the rows from `begin` on, as chunk[class][row].
template <class A>
void load_lanes(const Setup<A>& s, const View& v, RowOperand operand, int64_t class_stride, int64_t begin, int count,
                int64_t c, int64_t n, int width, Rows<A>& rows, A* chunk) {
  const int64_t stride = s.space.inner_stride(operand);
  s.space.walk(begin, count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    const int64_t offset = offsets[operand] + c * class_stride;
    if (class_stride == 1 && n > 1) {  // rows lie in memory as they are: turn them
      const A* from = in_place<A>(v, offset, 1);
      const int64_t from_stride = from ? stride : n;
      if (!from) {
        from = rows.turning;
        if (stride == n)
          load_run(v, offset, 1, length * n, rows.turning);
        else
          for (int64_t i = 0; i < length; ++i) load_run(v, offset + i * stride, 1, n, rows.turning + i * n);
      }
      transpose_matrix(from, from_stride, length, n, chunk + position, width);
    } else {
      for (int64_t j = 0; j < n; ++j)
        load_run(v, offset + j * class_stride, stride, length, chunk + j * width + position);
    }
  });
  if (count < width)
    for (int64_t j = 0; j < n; ++j) std::fill(chunk + j * width + count, chunk + (j + 1) * width, A(0));
}

template <class A, Spread kSpread>
void add_lane_wise(const Setup<A>& s, int64_t begin, Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  const int width = (rows.count + V::size - 1) / V::size * V::size;
  const int64_t step = kChunk / width;
  A prefix_mass = 0;
  for (int64_t c = 0; c < s.classes; c += step) {
    const int64_t n = std::min(step, s.classes - c);
    load_lanes(s, a.input, kInputRow, s.input_stride, begin, rows.count, c, n, width, rows, rows.chunk);
    if (kSpread == Spread::probabilities)
      load_lanes(s, a.target, kTargetRow, s.target_stride, begin, rows.count, c, n, width, rows, rows.target_chunk);
    if (!a.probabilities)
      for (int r = 0; r < rows.count; ++r)
        if (rows.label[r] >= c && rows.label[r] < c + n) rows.x_label[r] = rows.chunk[(rows.label[r] - c) * width + r];
    const A* w = kSpread != Spread::none ? s.weight.data() + c : nullptr;

    for (int r = 0; r < width; r += V::size) {
      V m = V::load(rows.max + r);
      for (int64_t j = 0; j < n; ++j) m = max(V::load(rows.chunk + j * width + r), m);
      const V safe = finite_or_zero(m), before = V::load(rows.safe + r);
      RowSums<A, kSpread> sums;
      if (c) {
        const V mass = kSpread == Spread::probabilities ? V::load(rows.mass + r) : V(prefix_mass);
        const V sum = V::load(rows.sum + r);
        sums.sum = select(sum == V(0), V(0), sum * exp(before - safe));
        sums.mass = V::load(rows.mass + r);
        sums.moment = V::load(rows.moment + r) + math::moment_term(mass, before - safe);
      }
      for (int64_t j = 0; j < n; ++j)
        sums.add(V::load(rows.chunk + j * width + r), safe, V::load(rows.target_chunk + j * width + r),
                 V(w ? w[j] : A(0)), s);
      m.store(rows.max + r);
      safe.store(rows.safe + r);
      sums.sum.store(rows.sum + r);
      sums.moment.store(rows.moment + r);
      if (kSpread == Spread::probabilities) {
        sums.mass.store(rows.mass + r);
        if (s.check_target && any(sums.bad))
          for (int i = 0; i < V::size && r + i < rows.count; ++i)
            if (sums.bad.m[i]) rows.state[r + i] = Rows<A>::kBad;
      }
    }
    if (kSpread == Spread::labels)
      for (int64_t j = 0; j < n; ++j) prefix_mass += w[j];
  }
  if (kSpread == Spread::labels)
    for (int r = 0; r < rows.count; ++r) rows.mass[r] = prefix_mass;
}

// ---- forward

template <class A, Spread kSpread>
Totals finish_rows(const Setup<A>& s, Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  const Policy& policy = a.flags.policy;
  const A of_bad = policy.on_violation == OnViolation::raise ? std::numeric_limits<A>::quiet_NaN() : A(0);
  for (int r = 0; r < rows.count; r += V::size) {
    const V m = V::load(rows.safe + r), lse = math::log_sum_exp(m, V::load(rows.sum + r));
    V l(0);
    if (kSpread != Spread::probabilities)
      l = math::label_loss(lse, V::load(rows.x_label + r), V::load(rows.w_label + r), V(s.smoothing));
    if (kSpread != Spread::none) {
      const V spread = math::spread_loss(lse, m, V::load(rows.mass + r), V::load(rows.moment + r));
      l = kSpread == Spread::labels ? l + V(s.spread) * spread : spread;
    }
    lse.store(rows.lse + r);
    l.store(rows.result + r);
  }
  Totals totals;
  for (int r = 0; r < rows.count; ++r) {
    if (kSpread == Spread::probabilities && rows.state[r] == Rows<A>::kBad) rows.mass[r] = kBadMass<A>;
    if (rows.state[r] == Rows<A>::kCounts && policy.check_finite && s.classes && !(rows.lse[r] - rows.lse[r] == 0))
      rows.state[r] = Rows<A>::kBad;
    if (rows.state[r] == Rows<A>::kBad) {
      ++totals.bad;
      rows.result[r] = of_bad;
    } else if (rows.state[r] == Rows<A>::kIgnored) {
      rows.result[r] = A(0);
    } else if (!s.classes) {
      rows.result[r] = A(0);  // an empty sum; the mean is 0 / 0, as native's
    } else {
      totals.denominator += a.probabilities ? A(1) : rows.w_label[r];
    }
    totals.loss += rows.result[r];
  }
  return totals;
}

template <class A>
void store_rows(const Setup<A>& s, const View& v, RowOperand operand, int64_t begin, int count, const A* from) {
  s.space.walk(begin, count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    store_run(v, offsets[operand], s.space.inner_stride(operand), length, from + position);
  });
}
template <class A>
void load_rows(const Setup<A>& s, const View& v, RowOperand operand, int64_t begin, int count, A* to) {
  s.space.walk(begin, count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    load_run(v, offsets[operand], s.space.inner_stride(operand), length, to + position);
  });
}

template <class A, Spread kSpread>
Totals cross_entropy_forward(const RowLoss& a, const View& loss) {
  const Setup<A> s(a, loss, View{}, a.flags.policy.strict);
  const int at_a_time = s.rows_at_a_time();
  return cpu::sum_over_blocks(s.space.numel(), s.rows_per_block(), [&](int64_t block_begin, int64_t block_end) {
    Totals totals;
    Rows<A> rows;
    for (int64_t begin = block_begin; begin < block_end; begin += at_a_time) {
      rows.start(int(std::min<int64_t>(at_a_time, block_end - begin)));
      rows.clear_sums();
      if (!a.probabilities) load_labels(s, begin, rows);
      if (s.row_wise) {
        s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
          for (int64_t i = 0; i < length; ++i)
            if (rows.state[position + i] == Rows<A>::kCounts)
              add_row_wise<A, kSpread>(s, int(position + i), offsets[kInputRow] + i * s.space.inner_stride(kInputRow),
                                       offsets[kTargetRow] + i * s.space.inner_stride(kTargetRow), rows);
        });
      } else {
        add_lane_wise<A, kSpread>(s, begin, rows);
      }
      totals += finish_rows<A, kSpread>(s, rows);
      if (loss) store_rows(s, loss, kLossRow, begin, rows.count, rows.result);
      store_rows(s, a.saved, kLseRow, begin, rows.count, rows.lse);
      if (a.saves_mass()) store_rows(s, s.saved_mass, kLseRow, begin, rows.count, rows.mass);
    }
    return totals;
  });
}

// ---- backward

// Per row: d loss/dx_c = scaled_mass exp(x_c - lse) - scale v_c, less scaled_label at the label.
template <class A>
struct RowGrads {
  alignas(64) A scale[kMaxRows], scaled_mass[kMaxRows], scaled_label[kMaxRows];
  alignas(64) A counts[kMaxRows];  // 1, or 0 for ignored and bad rows
};

template <class A, Spread kSpread>
void prepare_grads(const Setup<A>& s, const View& grad, int64_t begin, const A* tail, Rows<A>& rows, RowGrads<A>& g) {
  const RowLoss& a = s.loss;
  const A denominator = a.flags.reduction == Reduction::mean ? tail[kDenominator] : A(1);
  load_rows(s, grad, kLossRow, begin, rows.count, g.scale);
  load_rows(s, a.saved, kLseRow, begin, rows.count, rows.lse);
  if (kSpread == Spread::probabilities) load_rows(s, s.saved_mass, kLseRow, begin, rows.count, rows.mass);
  for (int r = 0; r < rows.count; ++r) {
    if (kSpread == Spread::probabilities && rows.mass[r] == kBadMass<A>) rows.state[r] = Rows<A>::kBad;
    if (rows.state[r] == Rows<A>::kCounts && tail[kCheckFinite] != 0 && !(rows.lse[r] - rows.lse[r] == 0))
      rows.state[r] = Rows<A>::kBad;
    g.counts[r] = A(rows.state[r] == Rows<A>::kCounts);
    if (rows.state[r] != Rows<A>::kCounts) {
      g.scale[r] = g.scaled_mass[r] = g.scaled_label[r] = A(0);
      continue;
    }
    g.scale[r] /= denominator;
    g.scaled_label[r] = g.scale[r] * (A(1) - s.smoothing) * rows.w_label[r];
    g.scaled_mass[r] = kSpread == Spread::probabilities ? g.scale[r] * rows.mass[r]
                                                        : g.scaled_label[r] + g.scale[r] * s.spread * s.weight_sum;
  }
}

// scale v_c for each of the vector's elements
template <class A, Spread kSpread>
LG_HD Simd<A> scaled_spread(const Setup<A>& s, Simd<A> scale, Simd<A> q, Simd<A> w) {
  using V = Simd<A>;
  if constexpr (kSpread == Spread::labels) return scale * V(s.spread) * w;
  if constexpr (kSpread == Spread::probabilities)
    return scale * math::smoothed(q, w, V(A(1) - s.smoothing), V(s.spread));
  return V(0);
}

template <class A, Spread kSpread>
void grad_row_wise(const Setup<A>& s, const View& out, int r, const int64_t* offsets, int64_t i, const RowGrads<A>& g,
                   Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  const int64_t input_offset = offsets[kInputRow] + i * s.space.inner_stride(kInputRow);
  const int64_t target_offset = offsets[kTargetRow] + i * s.space.inner_stride(kTargetRow);
  const int64_t out_offset = offsets[kGradRow] + i * s.space.inner_stride(kGradRow);
  const V lse(rows.lse[r]), scale(g.scale[r]), mass(g.scaled_mass[r]);
  const bool counts = rows.state[r] == Rows<A>::kCounts;
  for (int64_t c = 0; c < s.classes; c += kChunk) {
    const int64_t n = std::min<int64_t>(kChunk, s.classes - c);
    A* direct = in_place<A>(out, out_offset + c * s.grad_stride, s.grad_stride);
    A* to = direct ? direct : rows.chunk;
    if (!counts) {
      std::fill_n(to, n, A(0));
    } else {
      const A* x = load_row(a.input, input_offset + c, int64_t(1), n, rows.chunk);
      const A* q = kSpread == Spread::probabilities
                       ? load_row(a.target, target_offset + c * s.target_stride, s.target_stride, n, rows.target_chunk)
                       : x;
      const A* w = kSpread != Spread::none ? s.weight.data() + c : x;
      int64_t j = 0;
      for (; j + V::size <= n; j += V::size)
        math::logit_grad(V::load(x + j), lse, mass, scaled_spread<A, kSpread>(s, scale, V::load(q + j), V::load(w + j)))
            .store(to + j);
      if (j < n) {
        const int64_t rest = n - j;
        A lanes[V::size];
        math::logit_grad(load_tail(x + j, rest, A(0)), lse, mass,
                         scaled_spread<A, kSpread>(s, scale, load_tail(q + j, rest, A(0)), load_tail(w + j, rest, A(0))))
            .store(lanes);
        std::copy_n(lanes, rest, to + j);
      }
      if (rows.label[r] >= c && rows.label[r] < c + n) to[rows.label[r] - c] -= g.scaled_label[r];
    }
    if (!direct) store_run(out, out_offset + c * s.grad_stride, s.grad_stride, n, to);
  }
}

template <class A, Spread kSpread>
void grad_lane_wise(const Setup<A>& s, const View& out, int64_t begin, const RowGrads<A>& g, Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  struct Run {
    int64_t position, length, input, target, out;
  } runs[kMaxRows];
  int run_count = 0;
  s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    runs[run_count++] = {position, length, offsets[kInputRow], offsets[kTargetRow], offsets[kGradRow]};
  });
  const int64_t input_stride = s.space.inner_stride(kInputRow), target_stride = s.space.inner_stride(kTargetRow),
                out_stride = s.space.inner_stride(kGradRow);
  A* x = rows.chunk;
  A* q = rows.target_chunk;
  for (int64_t c = 0; c < s.classes; ++c) {
    for (int i = 0; i < run_count; ++i) {
      load_run(a.input, runs[i].input + c * s.input_stride, input_stride, runs[i].length, x + runs[i].position);
      if (kSpread == Spread::probabilities)
        load_run(a.target, runs[i].target + c * s.target_stride, target_stride, runs[i].length, q + runs[i].position);
    }
    const V w(kSpread != Spread::none ? s.weight[c] : A(0));
    for (int r = 0; r < rows.count; r += V::size) {
      const V scale = V::load(g.scale + r), lse = V::load(rows.lse + r);
      const V d = math::logit_grad(V::load(x + r), lse, V::load(g.scaled_mass + r),
                                   scaled_spread<A, kSpread>(s, scale, V::load(q + r), w));
      select(V::load(g.counts + r) == V(1), d, V(0)).store(rows.result + r);
    }
    for (int i = 0; i < run_count; ++i)
      store_run(out, runs[i].out + c * s.grad_stride, out_stride, runs[i].length, rows.result + runs[i].position);
  }
  if (kSpread == Spread::probabilities) return;

  if (out.dtype == dtype_of<A>) {
    for (int i = 0; i < run_count; ++i)
      for (int64_t j = 0; j < runs[i].length; ++j) {
        const int64_t r = runs[i].position + j;
        if (rows.label[r] >= 0)
          static_cast<A*>(out.data)[runs[i].out + j * out_stride + rows.label[r] * s.grad_stride] -= g.scaled_label[r];
      }
    return;
  }
  // The label's own class, anew and in one rounding: what a narrower type has rounded must not be read back.
  for (int i = 0; i < run_count; ++i)
    for (int64_t j = 0; j < runs[i].length; ++j) {
      const int64_t r = runs[i].position + j;
      x[r] = A(0);
      if (rows.label[r] >= 0) load_run(a.input, runs[i].input + j * input_stride + rows.label[r] * s.input_stride, 1, 1, x + r);
    }
  for (int r = 0; r < rows.count; r += V::size) {
    const V spread = scaled_spread<A, kSpread>(s, V::load(g.scale + r), V(0), V::load(rows.w_label + r));
    (math::logit_grad(V::load(x + r), V::load(rows.lse + r), V::load(g.scaled_mass + r), spread) - V::load(g.scaled_label + r))
        .store(rows.result + r);
  }
  for (int i = 0; i < run_count; ++i)
    for (int64_t j = 0; j < runs[i].length; ++j) {
      const int64_t r = runs[i].position + j;
      if (rows.state[r] == Rows<A>::kCounts)
        store_run(out, runs[i].out + j * out_stride + rows.label[r] * s.grad_stride, 1, 1, rows.result + r);
    }
}

// Short rows: turned into lanes, and the gradient turned back.
template <class A, Spread kSpread>
void grad_turned(const Setup<A>& s, const View& out, int64_t begin, const RowGrads<A>& g, Rows<A>& rows) {
  using V = Simd<A>;
  const RowLoss& a = s.loss;
  const int width = (rows.count + V::size - 1) / V::size * V::size;
  const int64_t n = s.classes;
  load_lanes(s, a.input, kInputRow, s.input_stride, begin, rows.count, 0, n, width, rows, rows.chunk);
  if (kSpread == Spread::probabilities)
    load_lanes(s, a.target, kTargetRow, s.target_stride, begin, rows.count, 0, n, width, rows, rows.target_chunk);
  for (int r = 0; r < rows.count; r += V::size) {
    const V scale = V::load(g.scale + r), lse = V::load(rows.lse + r), mass = V::load(g.scaled_mass + r);
    const auto counts = V::load(g.counts + r) == V(1);
    for (int64_t c = 0; c < n; ++c) {
      A* x = rows.chunk + c * width + r;
      const V q = V::load(rows.target_chunk + c * width + r), w(kSpread != Spread::none ? s.weight[c] : A(0));
      const V d = math::logit_grad(V::load(x), lse, mass, scaled_spread<A, kSpread>(s, scale, q, w));
      select(counts, d, V(0)).store(x);
    }
  }
  if (kSpread != Spread::probabilities)
    for (int r = 0; r < rows.count; ++r)
      if (rows.label[r] >= 0) rows.chunk[rows.label[r] * width + r] -= g.scaled_label[r];

  const int64_t stride = s.space.inner_stride(kGradRow);
  s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
    const int64_t offset = offsets[kGradRow];
    A* direct = in_place<A>(out, offset, 1);
    transpose_matrix(rows.chunk + position, width, n, length, direct ? direct : rows.turning, direct ? stride : n);
    if (direct) return;
    if (stride == n)
      store_run(out, offset, 1, length * n, rows.turning);
    else
      for (int64_t i = 0; i < length; ++i) store_run(out, offset + i * stride, 1, n, rows.turning + i * n);
  });
}

template <class A, Spread kSpread>
void cross_entropy_backward(const RowLoss& a, const View& grad, const View& out) {
  A tail[kSavedTail];
  load_run(a.saved, a.saved.numel() - kSavedTail, 1, kSavedTail, tail);
  const Setup<A> s(a, grad, out, tail[kStrict] != 0);
  const int at_a_time = s.rows_at_a_time();
  const int64_t n = s.space.numel(), block = s.rows_per_block();
  if (!n || !s.classes) return;
  cpu::for_each_block((n + block - 1) / block, [&](int64_t index) {
    Rows<A> rows;
    RowGrads<A> g;
    const int64_t block_end = std::min(n, (index + 1) * block);
    for (int64_t begin = index * block; begin < block_end; begin += at_a_time) {
      rows.start(int(std::min<int64_t>(at_a_time, block_end - begin)));
      if (kSpread == Spread::probabilities)
        std::fill_n(rows.label, rows.count, int64_t(-1));
      else
        load_labels(s, begin, rows);
      prepare_grads<A, kSpread>(s, grad, begin, tail, rows, g);
      if (s.row_wise)
        s.space.walk(begin, rows.count, [&](int64_t position, int64_t length, const int64_t* offsets) {
          for (int64_t i = 0; i < length; ++i) grad_row_wise<A, kSpread>(s, out, int(position + i), offsets, i, g, rows);
        });
      else if (s.input_stride == 1 && s.grad_stride == 1)
        grad_turned<A, kSpread>(s, out, begin, g, rows);
      else
        grad_lane_wise<A, kSpread>(s, out, begin, g, rows);
    }
  });
}

}  // namespace lossguard::LOSSGUARD_ISA
