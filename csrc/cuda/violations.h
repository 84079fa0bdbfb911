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

  // What another warp or block found.
  __device__ void absorb(const Record& r) {
    const int lane = lane_id();
    if (lane < kCounters) counter += r.counters[lane];
    if (lane == 0 && get<V>(r.low) < extreme) extreme = get<V>(r.low);
    if (lane == 1 && get<V>(r.high) > extreme) extreme = get<V>(r.high);
    list(lane < kListed ? r.index[lane] : kNowhere, lane < kListed ? get<V>(r.value[lane]) : V(0), true);
  }
  __device__ void store(Record& r) const {
    const int lane = lane_id();
    if (lane < kCounters) r.counters[lane] = counter;
    if (lane == 0) r.low = as_value(extreme);
    if (lane == 1) r.high = as_value(extreme);
    store_list(r);
  }

  __device__ __forceinline__ void load_list(const Record& r) {
    if (lane_id() >= kListed) return;
    index = r.index[lane_id()];
    value = get<V>(r.value[lane_id()]);
  }
  __device__ __forceinline__ void store_list(Record& r) const {
    if (lane_id() >= kListed) return;
    r.index[lane_id()] = index;
    r.value[lane_id()] = as_value(value);
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

 private:
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

// By a whole warp, seldom: lanes whose `kind` is not kValid bring an offender each. Not inlined: it would be most of
// every kernel's code. Where everything is wrong, nearly every call is done with its counters after four votes.
template <class V>
__device__ __noinline__ void note_offenders(Record* record, bool first, int kind, int64_t at, V v, int64_t classes) {
  Record& r = *record;
  const int lane = lane_id();
  if (first) Offenders<V>().store(r);
  __syncwarp();
  const V low = get<V>(r.low), high = get<V>(r.high);
  const int64_t last_listed = r.index[kListed - 1];
  __syncwarp();
  const bool bad = kind != kValid, ordered = bad && kind != kNaN;

  if (__any_sync(kAllLanes, bad && at < last_listed)) {
    Offenders<V> offenders;
    offenders.load_list(r);
    offenders.list(bad ? at : kNowhere, v, false);
    offenders.store_list(r);
  }
  if (__any_sync(kAllLanes, ordered && (v < low || v > high))) {
    const V least = least_of(ordered ? v : low), greatest = greatest_of(ordered ? v : high);
    if (lane == 0 && least < low) r.low = as_value(least);
    if (lane == 0 && greatest > high) r.high = as_value(greatest);
  }
  const auto count = [&](int counter, bool mine) {
    const unsigned ballot = __ballot_sync(kAllLanes, mine);
    if (lane == 0) r.counters[counter] += __popc(ballot);
    return ballot;
  };
#pragma unroll 1
  for (unsigned rest = __ballot_sync(kAllLanes, bad); rest;) {  // few kinds at a time
    const int one = broadcast_from(kind, __ffs(int(rest)) - 1);
    rest &= ~count(one, kind == one);
  }
  if constexpr (std::numeric_limits<V>::is_integer) {  // labels
    if (__any_sync(kAllLanes, bad && (v == -1 || v == -100 || v == 255 || v == classes))) {
      count(int(kKinds) + kMinusOne, bad && v == -1);
      count(int(kKinds) + kMinus100, bad && v == -100);
      count(int(kKinds) + k255, bad && v == 255);
      count(int(kKinds) + kNumClasses, bad && v == classes);
    }
  }
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
    note_offenders<V>(&record, !any, kind, at, v, classes);
    any = true;
  }
};

}  // namespace lossguard::cuda
