// Walks several strided operands together: dimensions sorted into memory order and merged where
// every operand allows it, then visited as runs along the innermost one.
#pragma once
#include <cstdint>

#include "view.h"

namespace lossguard::LOSSGUARD_ISA {

enum class Order { memory, logical };

template <int K>
class Space {
 public:
  // All present views have one shape; the first decides the order. An absent view gets strides of 0.
  Space(const View* const (&views)[K], Order order) {
    const View& first = *views[0];
    int dims[kMaxDims];
    for (int d = 0; d < first.ndim; ++d) {
      numel_ *= first.sizes[d];
      if (first.sizes[d] == 1) continue;
      int at = ndim_++;
      if (order == Order::memory)
        for (; at > 0 && first.strides[dims[at - 1]] < first.strides[d]; --at) dims[at] = dims[at - 1];
      dims[at] = d;
    }
    int kept = 0;
    for (int i = 0; i < ndim_; ++i) {
      const int d = dims[i];
      bool merges = kept > 0;
      for (int k = 0; k < K && merges; ++k)
        merges = strides_[k][kept - 1] == stride(views[k], d) * first.sizes[d];
      const int to = merges ? kept - 1 : kept++;
      sizes_[to] = merges ? sizes_[to] * first.sizes[d] : first.sizes[d];
      for (int k = 0; k < K; ++k) strides_[k][to] = stride(views[k], d);
    }
    ndim_ = kept;
    if (ndim_ == 0) {  // one element
      ndim_ = 1;
      sizes_[0] = 1;
      for (int k = 0; k < K; ++k) strides_[k][0] = 1;
    }
    for (int k = 0; k < K; ++k) {
      int64_t dense = 1;
      flat_[k] = true;
      for (int d = ndim_ - 1; d >= 0; --d) {
        flat_[k] = flat_[k] && strides_[k][d] == dense;
        dense *= sizes_[d];
      }
    }
  }

  int64_t numel() const { return numel_; }
  int ndim() const { return ndim_; }
  int64_t size(int d) const { return sizes_[d]; }
  int64_t stride_of(int k, int d) const { return strides_[k][d]; }
  int64_t inner_stride(int k) const { return strides_[k][ndim_ - 1]; }
  bool flat(int k) const { return flat_[k]; }  // element i lies at offset i

  // f(position, length, offsets of the K operands) for each run of [begin, begin + count)
  template <class F>
  void walk(int64_t begin, int64_t count, F&& f) const {
    int64_t at[kMaxDims], offsets[K] = {};
    int64_t rest = begin;
    for (int d = ndim_ - 1; d >= 0; --d) {
      at[d] = d ? rest % sizes_[d] : rest;
      rest /= sizes_[d] ? sizes_[d] : 1;
      for (int k = 0; k < K; ++k) offsets[k] += at[d] * strides_[k][d];
    }
    const int inner = ndim_ - 1;
    for (int64_t position = 0; position < count;) {
      int64_t run = sizes_[inner] - at[inner];
      if (run > count - position) run = count - position;
      f(position, run, offsets);
      position += run;
      advance(at, offsets, inner, run);
      for (int d = inner; d > 0 && at[d] == sizes_[d]; --d) {
        advance(at, offsets, d, -sizes_[d]);
        advance(at, offsets, d - 1, 1);
      }
    }
  }

 private:
  static int64_t stride(const View* v, int d) { return v && *v ? v->strides[d] : 0; }
  void advance(int64_t* at, int64_t* offsets, int d, int64_t by) const {
    at[d] += by;
    for (int k = 0; k < K; ++k) offsets[k] += by * strides_[k][d];
  }

  int ndim_ = 0;
  int64_t numel_ = 1;
  int64_t sizes_[kMaxDims];
  int64_t strides_[K][kMaxDims];
  bool flat_[K];
};

}  // namespace lossguard::LOSSGUARD_ISA
