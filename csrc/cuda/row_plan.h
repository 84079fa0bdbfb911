// What the host finds out about rows before it chooses a kernel: their walk, and which kernels could take them.
#pragma once
#include "rows.h"

namespace lossguard::cuda {

constexpr int kFlatBytes = 128;  // cross_entropy_flat.h: of a row's logits, and of its probabilities if it has them

inline int64_t blocks_for(int64_t items, int64_t per_block) { return (items + per_block - 1) / per_block; }

template <class T>
class RowPlan {
 public:
  Rows rows{};
  RowLayout layout;
  Layout<1> logical;

  // per_row: the loss, or its gradient; out: the gradient of input, or absent.
  RowPlan(const RowLoss& a, const View& per_row, const View& out)
      : a_(a),
        input_rows_(a.input.without_dim(a.class_dim)),
        target_rows_(a.probabilities ? a.target.without_dim(a.class_dim) : a.target),
        lse_rows_(input_rows_.dense_over(a.saved)),
        out_rows_(out ? out.without_dim(a.class_dim) : out),
        per_row_(per_row),
        space_(views_, Order::memory) {
    rows.input = operand(a.input);
    rows.target = operand(a.target);
    rows.weight = operand(a.weight);
    rows.result = operand(per_row);
    rows.out = operand(out);
    rows.lse = operand(a.saved);
    rows.n = space_.numel();
    if (a.saves_mass()) {
      rows.mass = rows.lse;
      rows.mass.data = static_cast<wide_t<T>*>(rows.lse.data) + rows.n;
    }
    rows.tail = tail_of(a.saved);
    rows.classes = a.classes();
    rows.input_stride = a.input.strides[a.class_dim];
    rows.target_stride = a.probabilities ? a.target.strides[a.class_dim] : 0;
    rows.out_stride = out ? out.strides[a.class_dim] : 0;
    rows.weight_stride = a.weight ? a.weight.strides[0] : 0;
    rows.inner = 1;
    for (int d = a.class_dim + 1; d < a.input.ndim; ++d) rows.inner *= a.input.sizes[d];
    rows.ignore_index = a.ignore_index;
    rows.smoothing = a.smoothing;
    rows.spread = rows.classes ? a.smoothing / double(rows.classes) : 0;
    const auto bounds = math::tolerant_unit_bounds<double>(epsilon_of(a.target.dtype));
    rows.low = bounds.low;
    rows.high = bounds.high;
    rows.mean = a.flags.reduction == Reduction::mean;
    fits = make_layout(space_, layout) && make_logical(input_rows_, logical);
  }
  RowPlan(const RowPlan&) = delete;

  bool fits;  // into the kernels' arguments

  // Rows of neighbouring classes, in dtypes the kernels for them read.
  bool by_row() const {
    if (rows.classes == 0 || (rows.input_stride != 1 && rows.classes != 1)) return false;
    if (rows.out && rows.out_stride != 1 && rows.classes != 1) return false;
    if (a_.weight && (!readable(a_.weight) || rows.weight_stride != 1)) return false;
    return !a_.probabilities || (readable(a_.target) && (rows.target_stride == 1 || rows.classes == 1));
  }
  bool flat() const {
    const int64_t bytes = rows.classes * int64_t(sizeof(T));
    if (bytes % 16 == 0) return false;  // packs of their own, see cross_entropy_rows.h
    if (bytes > (a_.probabilities ? kFlatBytes / 2 : kFlatBytes)) return false;
    if (a_.probabilities && (a_.target.dtype != a_.input.dtype || !dense(kTargetRow))) return false;
    return dense(kInputRow) && (!rows.out || dense(kOutRow));
  }
  // Packs of a row, at the worst alignment that occurs.
  int64_t packs() const {
    constexpr int size = Pack<T>::size;
    const RowOperand cut = rows.out ? kOutRow : kInputRow;
    const int past = aligned(cut, rows.out ? rows.out : rows.input) ? 0 : size - 1;
    return (rows.classes + past + size - 1) / size;
  }
  bool by_pixels() const {
    const int last = space_.ndim() - 1;
    return rows.classes > 0 && space_.size(last) % Pack<T>::size == 0 &&
           packed(kInputRow, rows.input, rows.input_stride, last) &&
           (!rows.out || packed(kOutRow, rows.out, rows.out_stride, last)) &&
           (!a_.probabilities ||
            (a_.target.dtype == a_.input.dtype && packed(kTargetRow, rows.target, rows.target_stride, last)));
  }

  bool dense_out() const { return (rows.out_stride == 1 || rows.classes == 1) && dense(kOutRow); }
  // As by_pixels, where only `out` is walked.
  bool out_by_pixels() const {
    const int last = space_.ndim() - 1;
    return space_.size(last) % Pack<T>::size == 0 && packed(kOutRow, rows.out, rows.out_stride, last);
  }

 private:
  bool readable(const View& v) const {
    return v.dtype == a_.input.dtype || (sizeof(T) < sizeof(float) && v.dtype == DType::f32);
  }
  // Whether the rows along dimension `last` can be had in 16-byte packs, in every class.
  bool packed(RowOperand k, const Operand& o, int64_t class_stride, int last) const {
    return space_.stride_of(k, last) == 1 && (class_stride % Pack<T>::size == 0 || rows.classes == 1) &&
           aligned(k, o, last);
  }
  bool dense(RowOperand k) const { return space_.ndim() == 1 && (space_.stride_of(k, 0) == rows.classes || rows.n == 1); }
  // Whether every row starts on a 16-byte boundary. `but` is a dimension not to look at.
  bool aligned(RowOperand k, const Operand& o, int but = -1) const {
    if (reinterpret_cast<uintptr_t>(o.data) % 16) return false;
    for (int d = 0; d < space_.ndim(); ++d)
      if (d != but && space_.size(d) > 1 && space_.stride_of(k, d) % Pack<T>::size) return false;
    return true;
  }

  const RowLoss& a_;
  const View input_rows_, target_rows_, lse_rows_, out_rows_, per_row_;
  const View* const views_[kRowOperands] = {&input_rows_, &target_rows_, &per_row_, &lse_rows_, &out_rows_};
  const Space<kRowOperands> space_;
};

}  // namespace lossguard::cuda
