// The device side of the host: streams' workspaces, the mailbox, and what the driver has to say.
// No CUDA type, so that what includes it needs no CUDA header.
#pragma once
#include <cstdint>

#include "../report.h"

namespace lossguard::cuda {

using Error = const char*;  // null, or what went wrong in CUDA's words; static or of this thread

struct Place {
  int device;
  void* stream;
  bool capturing = false;   // a graph: nothing can be waited for, and what a launch works in must be the graph's
  void* scratch = nullptr;  // there: memory of scratch_size() for a forward
};

struct DriverStatus {
  int driver = 0, runtime = 0;  // as CUDA counts: 1000 major + 10 minor; 0: no driver
  Error error = nullptr;        // why no kernel can be launched
};
DriverStatus driver_status();

bool is_capturing(const Place&);
Error scratch_size(int device, int64_t& bytes);

// ---- the mailbox: one slot a launch, into which it writes only if something is wrong

struct Slot;

// Whether a launch sent anything since this was last asked: a plain load a device.
bool bell_rang();

enum class Answer { none_yet, right, wrong };
// What its launch, or, of a captured one, what a replay had to say. Only with `query` is CUDA asked whether it is over.
// `lost`: reports that found the slot full.
Answer ask(Slot&, bool query, Violations& found, int64_t& lost);
Error wait(const Slot&);
void give_back(Slot&);
// Whether launches share it: of replays of a graph, or when there were too many in flight for one each.
bool is_shared(const Slot&);
// Whether the graph that its launch was captured into is gone: it is nobody's, then, and can be given back.
bool is_abandoned(const Slot&);
// Waits for all that the stream has been given.
Error drain(const Place&);

// At most this many slots a device, by default 1024; for tests.
void limit_slots(int most);

// How often each function of the CUDA runtime was called.
void for_runtime_calls(void (*f)(const char* function, int64_t calls, void* context), void* context);

}  // namespace lossguard::cuda
