// From C++ to the Python exception a person reads.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "policy.h"
#include "report.h"
#include "view.h"

namespace lossguard {

// What is reported of a tensor, without keeping it alive.
struct Given {
  std::vector<int64_t> shape;
  DType dtype;

  explicit Given(const View& v) : shape(v.sizes, v.sizes + v.ndim), dtype(v.dtype) {}
  Given(std::vector<int64_t> shape, DType dtype) : shape(std::move(shape)), dtype(dtype) {}
};

// Who was called with what.
struct Call {
  const char* loss;  // "CrossEntropyLoss", or an operation that takes indices: "embedding"
  int64_t site;      // python/lossguard/_callsite.py; 0: the call site is on the Python stack now
  Flags flags;
  Given input, target;
  int device_type, device_index;
  int64_t num_classes = -1;  // -1: the loss has none
  int64_t ignore_index = 0;
  std::vector<int64_t> samples = ambient::samples();  // of the vmaps around it
};

struct Finding {
  Call call;
  Violations violations;
  int64_t lost = 0;       // more like it, of which no report is left
  bool captured = false;  // the call was recorded into a CUDA graph, and this is of a replay
  bool again = false;     // another thread has been told
};

// Where a finding comes to light.
enum class Moment { the_call, a_call, backward, step, check, leave, exit };

// Hands findings to Python (`lossguard._violations.handle`), which counts, warns or returns the exception to be
// thrown. Throws it; returns where the policy says to go on.
void deliver(const std::vector<Finding>&, Moment);

// Arguments no kernel takes. Python then asks native torch, which computes or raises its own error.
[[noreturn]] void throw_unsupported(const std::string& why);

}  // namespace lossguard
