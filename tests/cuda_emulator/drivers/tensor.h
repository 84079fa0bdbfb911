// The tensors of the drivers. A buffer is exactly as long as what its elements span, so that ASan sees every access
// beyond; what lies between elements is filled with 0xff (NaN, or -1) and must stay so.
#pragma once
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "random.h"
#include "view.h"

namespace drivers {

using namespace lossguard;
using Sizes = std::vector<int64_t>;

inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32: return 4;
    case DType::u8: return 1;
    default: return 2;
  }
}
inline const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float32", "float64", "float16", "bfloat16", "int64", "uint8"};
  return names[int(dtype)];
}

enum class Layout {
  dense,          // row-major, from a 16-byte boundary on
  offset,         // the same, an element later
  padded,         // rows 16 bytes further apart than they are long
  ragged,         // .. an element
  transposed,     // column-major
  channels_last,  // dimension 1 innermost
  every_second,   // element of the last dimension
  repeated,       // along dimension 0: one row for all
  one,            // element for all
  far,            // rows more than 2^31 elements apart
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const Sizes& sizes, Layout layout = Layout::dense) {
    view_.dtype = dtype;
    view_.present = true;
    view_.ndim = int(sizes.size());
    for (int d = 0; d < view_.ndim; ++d) view_.sizes[d] = sizes[d];
    lay_out(layout);
    int64_t span = numel() ? 1 : 0;
    for (int d = 0; d < view_.ndim && span; ++d) span += (view_.sizes[d] - 1) * view_.strides[d];
    const int64_t before = layout == Layout::offset ? bytes_of(dtype) : 0;
    size_ = size_t(before + span * bytes_of(dtype));
    is_far_ = layout == Layout::far;
    buffer_ = is_far_ ? allocate_far(size_) : allocate(size_);
    view_.data = buffer_.get() + before;
  }

  explicit operator bool() const { return view_.present; }
  const View& view() const { return view_; }
  DType dtype() const { return view_.dtype; }
  int64_t numel() const { return view_.present ? view_.numel() : 0; }
  Sizes sizes() const { return Sizes(view_.sizes, view_.sizes + view_.ndim); }

  // Elements by their index in logical order.
  double get(int64_t i) const { return operand().load<double>(offset_of(i)); }
  int64_t label(int64_t i) const { return operand().load_label(offset_of(i)); }
  void set(int64_t i, double v) { operand().store(offset_of(i), v); }
  void set_label(int64_t i, int64_t v) {
    if (dtype() == DType::i64)
      static_cast<int64_t*>(view_.data)[offset_of(i)] = v;
    else
      static_cast<uint8_t*>(view_.data)[offset_of(i)] = uint8_t(v);
  }
  // What the dtype makes of v.
  double rounded(double v) const {
    Tensor one(dtype(), {});
    one.set(0, v);
    return one.get(0);
  }

  // All but the elements is as it was allocated. Far tensors are too long to look.
  bool untouched_between() const {
    if (is_far_) return true;
    const std::vector<char> copy = contents();
    for (int64_t i = 0; i < numel(); ++i) std::memset(address_of(i), 0xff, size_t(bytes_of(dtype())));
    const bool ok = only_poison(buffer_.get());
    std::memcpy(buffer_.get(), copy.data(), size_);
    return ok;
  }
  std::vector<char> contents() const {
    if (!is_far_) return std::vector<char>(buffer_.get(), buffer_.get() + size_);
    std::vector<char> elements;
    for (int64_t i = 0; i < numel(); ++i) elements.insert(elements.end(), address_of(i), address_of(i) + bytes_of(dtype()));
    return elements;
  }

 private:
  using Buffer = std::shared_ptr<char>;

  void lay_out(Layout layout) {
    const int n = view_.ndim;
    int order[kMaxDims];  // of dimensions, from the innermost
    for (int i = 0; i < n; ++i) order[i] = layout == Layout::transposed ? i : n - 1 - i;
    if (layout == Layout::channels_last && n > 2) {
      order[0] = 1;
      for (int i = 1; i < n - 1; ++i) order[i] = n - i;
    }
    int64_t stride = layout == Layout::every_second ? 2 : 1;
    for (int i = 0; i < n; ++i) {
      view_.strides[order[i]] = stride;
      stride *= view_.sizes[order[i]];
      if (i == 0 && layout == Layout::padded) stride += 16 / bytes_of(dtype());
      if (i == 0 && layout == Layout::ragged) stride += 1;
      if (i == n - 2 && layout == Layout::far) stride = (int64_t(1) << 31) + 8;
    }
    for (int d = 0; d < n; ++d)
      if (layout == Layout::one || (layout == Layout::repeated && d == 0)) view_.strides[d] = 0;
  }

  static Buffer allocate(size_t size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, size ? size : 1) != 0) std::abort();
    std::memset(memory, 0xff, size ? size : 1);
    return Buffer(static_cast<char*>(memory), std::free);
  }
  // Pages that are touched nowhere else; before them, as many that must not be.
  static Buffer allocate_far(size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    const size_t page = 1 << 12, half = (size + page - 1) / page * page;
    void* memory = mmap(nullptr, 2 * half, PROT_NONE, flags, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("no address space for a far tensor");
      std::abort();
    }
    char* const data = static_cast<char*>(memory) + half;
    if (mprotect(data, half, PROT_READ | PROT_WRITE) != 0) std::abort();
    return Buffer(data, [memory, half](char*) { munmap(memory, 2 * half); });
  }

  cuda::Operand operand() const { return cuda::operand(view_); }
  int64_t offset_of(int64_t i) const {
    int64_t at = 0;
    for (int d = view_.ndim - 1; d >= 0; --d) {
      at += i % view_.sizes[d] * view_.strides[d];
      i /= view_.sizes[d];
    }
    return at;
  }
  char* address_of(int64_t i) const { return static_cast<char*>(view_.data) + offset_of(i) * bytes_of(dtype()); }
  bool only_poison(const char* bytes) const {
    for (size_t i = 0; i < size_; ++i)
      if (static_cast<unsigned char>(bytes[i]) != 0xff) return false;
    return true;
  }

  View view_;
  Buffer buffer_;
  size_t size_ = 0;
  bool is_far_ = false;
};

}  // namespace drivers
