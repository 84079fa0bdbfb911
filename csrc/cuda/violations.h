// How kernels keep account of what is wrong: nothing in a good pass but the range of what is right.
//
// A warp meets an offender behind a vote and then works together: its lanes hold the counters and the
// 16 offenders that come first in the tensor's logical order, whatever order the kernel walks in.
// Blocks merge their warps, the last block merges the blocks; no atomic operation touches any of it,
// so that a tensor that is wrong everywhere costs a few passes, not a storm.
#pragma once
#include "../math/check.h"
#include "../report.h"
#include "device.h"

namespace lossguard::cuda {

constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
constexpr int kCounters = int(kKinds) + int(kWellKnown);
static_assert(kCounters <= kWarp && kListed == kWarp / 2, "a warp holds them in its lanes");

__device__ __forceinline__ Value as_value(int64_t v) {
  Value value;
  value.i = v;
  return value;
}
__device__ __forceinline__ Value as_value(double v) {
  Value value;
  value.d = v;
  return value;
}
template <class V>
__device__ __forceinline__ V get(Value v);
template <>
__device__ __forceinline__ int64_t get<int64_t>(Value v) {
  return v.i;
}
template <>
__device__ __forceinline__ double get<double>(Value v) {
  return v.d;
}

// The offenders a warp or a block found, in memory.
struct Record {
  int64_t counters[kCounters];  // kinds, then well-known labels
  Value low, high;              // of those that are not NaN
  int64_t index[kListed];
  Value value[kListed];
};

// A record in the lanes of a warp, while the warp works on it. V: int64_t for labels, double for all else.
template <class V>
struct Offenders {
  int64_t counter = 0;       // lane k: the k-th
  V extreme;                 // lane 0: the smallest; lane 1: the largest
  int64_t index = kNowhere;  // lanes 0 to 15, ascending
  V value = V(0);

  __device__ __forceinline__ Offenders() : extreme(lane_id() == 0 ? kHighest<V> : kLowest<V>) {}

  // By the whole warp: lanes whose `kind` is not kValid bring an offender each.
  __device__ void note(int kind, int64_t at, V v, int64_t classes = -1) {
    const int lane = lane_id();
    const bool bad = kind != kValid;
#pragma unroll 1
    for (int k = 0; k < kKinds; ++k) add(k, __ballot_sync(kAllLanes, kind == k), lane);
    if constexpr (std::numeric_limits<V>::is_integer) {  // labels
      add(int(kKinds) + kMinusOne, __ballot_sync(kAllLanes, bad && v == -1), lane);
      add(int(kKinds) + kMinus100, __ballot_sync(kAllLanes, bad && v == -100), lane);
      add(int(kKinds) + k255, __ballot_sync(kAllLanes, bad && v == 255), lane);
      add(int(kKinds) + kNumClasses, __ballot_sync(kAllLanes, bad && v == classes), lane);
    }
    const bool ordered = bad && kind != kNaN;
    widen_extremes(least_of(ordered ? v : kHighest<V>), greatest_of(ordered ? v : kLowest<V>));
    list(bad ? at : kNowhere, v, false);
  }

  // By the whole warp: what another warp or block found.
  __device__ void absorb(const Record& r) {
    const int lane = lane_id();
    if (lane < kCounters) counter += r.counters[lane];
    widen_extremes(get<V>(r.low), get<V>(r.high));
    list(lane < kListed ? r.index[lane] : kNowhere, lane < kListed ? get<V>(r.value[lane]) : V(0), true);
  }

  __device__ void store(Record& r) const {
    const int lane = lane_id();
    if (lane < kCounters) r.counters[lane] = counter;
    if (lane == 0) r.low = as_value(extreme);
    if (lane == 1) r.high = as_value(extreme);
    if (lane < kListed) {
      r.index[lane] = index;
      r.value[lane] = as_value(value);
    }
  }

 private:
  __device__ __forceinline__ void add(int k, unsigned ballot, int lane) {
    if (lane == k) counter += __popc(ballot);
  }
  __device__ __forceinline__ void widen_extremes(V low, V high) {
    const int lane = lane_id();
    if (lane == 0 && low < extreme) extreme = low;
    if (lane == 1 && high > extreme) extreme = high;
  }
  // One offender a lane into the list of the 16 first: a bitonic sort of the new ones, then a merge.
  __device__ void list(int64_t new_index, V new_value, bool sorted) {
    const int lane = lane_id();
    if (!__any_sync(kAllLanes, new_index < broadcast_from(index, kListed - 1))) return;
#pragma unroll 1
    for (int size = sorted ? 2 * kWarp : 2; size <= kWarp; size *= 2)
#pragma unroll 1
      for (int step = size / 2; step > 0; step /= 2) exchange(new_index, new_value, step, (lane & size) == 0);
    // Old ones, descending, behind new ones, ascending: a bitonic sequence.
    const int64_t old_index = broadcast_from(index, kWarp - 1 - lane);
    const V old_value = broadcast_from(value, kWarp - 1 - lane);
    index = lane < kListed ? new_index : old_index;
    value = lane < kListed ? new_value : old_value;
#pragma unroll 1
    for (int step = kListed; step > 0; step /= 2) exchange(index, value, step, true);
    if (lane >= kListed) index = kNowhere;
  }
  static __device__ __forceinline__ void exchange(int64_t& index, V& value, int step, bool ascending) {
    const int64_t other_index = __shfl_xor_sync(kAllLanes, index, step);
    const V other_value = __shfl_xor_sync(kAllLanes, value, step);
    const bool keep_smaller = ((lane_id() & step) == 0) == ascending;
    if (keep_smaller ? other_index < index : other_index > index) {
      index = other_index;
      value = other_value;
    }
  }
};

// By a whole warp, seldom. Not inlined: it would be most of every kernel's code.
template <class V>
__device__ __noinline__ void note_offender(Record* record, bool first, int kind, int64_t at, V v, int64_t classes) {
  Offenders<V> offenders;
  if (!first) offenders.absorb(*record);
  offenders.note(kind, at, v, classes);
  __syncwarp();
  offenders.store(*record);
  __syncwarp();
}

// By a whole warp: merges every `step`-th of the records that are present. False if there is none.
template <class V, class Present>
__device__ __forceinline__ bool merge_records(Record& to, const Record* records, int begin, int end, int step,
                                              const Present& present) {
  bool any = false;
  Offenders<V> offenders;
#pragma unroll 1
  for (int i = begin; i < end; i += step) {
    if (!present(i)) continue;
    offenders.absorb(records[i]);
    any = true;
  }
  __syncwarp();
  if (any) offenders.store(to);
  __syncwarp();
  return any;
}

// One check of one tensor, as a thread sees it. T: the type it compares in.
template <class T>
struct Watch {
  int64_t seen = 0;  // elements that count, where the host cannot tell
  T low = kHighest<T>, high = kLowest<T>;  // of the valid ones
  bool any = false;  // whether this warp has a record: the same in every lane

  __device__ __forceinline__ void widen_range(T v) {
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  // By the whole warp: lanes whose `kind` is not kValid bring an offender each. `record` is the warp's own.
  template <class V>
  __device__ __forceinline__ void note(Record& record, int kind, int64_t at, V v, int64_t classes = -1) {
    note_offender<V>(&record, !any, kind, at, v, classes);
    any = true;
  }
};

}  // namespace lossguard::cuda
