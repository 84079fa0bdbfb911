// The device side of the host: streams' workspaces, the mailbox, and what the driver has to say.
// No CUDA type, so that ops.cpp needs no CUDA header.
#pragma once
#include <cstdint>

#include "../report.h"

namespace lossguard::cuda {

using Error = const char*;  // null, or what went wrong in CUDA's words; static or of this thread

struct Place {
  int device;
  void* stream;
};

struct DriverStatus {
  int driver = 0, runtime = 0;  // as CUDA counts: 1000 major + 10 minor; 0: no driver
  Error error = nullptr;        // why no kernel can be launched
};
DriverStatus driver_status();

}  // namespace lossguard::cuda
