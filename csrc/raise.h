// From C++ to the Python exception a person reads.
#pragma once
#include <string>

#include "policy.h"
#include "report.h"
#include "view.h"

namespace lossguard {

// Who was called with what; enough to write a report without keeping a tensor alive.
struct Call {
  const char* loss;  // "CrossEntropyLoss"
  int64_t site;      // 0: the call site is on the Python stack now
  const Flags& flags;
  const View& input;
  const View& target;
  int device_type;
  int device_index;
  int64_t num_classes = -1;  // -1: the loss has none
  int64_t ignore_index = 0;
};

// Hands the report to Python (`lossguard._violations.handle`), which counts, warns or returns the
// exception to be thrown. Throws it; returns where the policy says to go on.
void deliver(const Violations&, const Call&);

// Arguments no kernel takes. Python then asks native torch, which computes or raises its own error.
[[noreturn]] void throw_unsupported(const std::string& why);

}  // namespace lossguard
