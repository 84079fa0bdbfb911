// The end of every forward kernel: blocks leave their partial sums and offenders in the workspace, and
// the last one to finish adds them up in a fixed order, writes the loss and what the backward needs,
// and, only when something is wrong, the report.
#pragma once
#include "../losses.h"
#include "violations.h"

namespace lossguard::cuda {

constexpr int kSplitValues = 5;  // of a part of a row, see cross_entropy_rows.h

// What a block, or the finishing of split rows, adds to the result.
struct Partial {
  struct Seen {
    int64_t seen;
    Value low, high;  // of the valid values
  };
  double loss, denominator;
  Seen target, input;
  int32_t target_bad, input_bad;  // whether a Record lies beside it
};

// Mapped pinned host memory, written only when something is wrong.
struct Mail {
  uint32_t flag;  // 0: nothing here; set after the rest. The host clears it when it has read the rest
  uint32_t lost;  // reports that found the flag still set
  Violations violations;
};
static_assert(sizeof(Violations) % sizeof(int64_t) == 0 && offsetof(Mail, violations) % sizeof(int64_t) == 0);

// The workspace of a stream, see runtime.cu. Kernels of one stream follow each other, so they share it.
struct Scratch {
  unsigned* ticket;      // 0 between kernels
  Partial* partials;     // (parts)
  Record* target_found;  // (parts)
  Record* input_found;   // (parts)
  Violations* report;
  double* splits;        // see cross_entropy_rows.h
};

struct Finish {
  Scratch scratch;
  Mail* mail;
  uint32_t* bell;      // likewise mapped: 1 when something lies in a mail of the device
  Operand loss;        // (): the mean or the sum; absent: every element or row has its own
  Operand tail;        // (kSavedTail)
  bool mean, strict, check_finite;
  bool zero_if_weightless;  // a mean over a denominator of 0 is 0 / 0
  double of_bad;       // the loss of an element or row that fails a check
  Check target_check, input_check;
  bool watch_input;    // input is checked
  int64_t target_seen, input_seen;  // -1: as the kernel counted
  int64_t classes, inner;  // 0, or input's offenders come in the order of rows: numbered row x classes + class
};

// In the logical order of a tensor with `inner` elements behind each class.
__device__ __forceinline__ int64_t element_index(int64_t row, int64_t c, int64_t classes, int64_t inner) {
  return (row / inner * classes + c) * inner + row % inner;
}

// Of a thread. T: the target's values as they are compared.
template <class T, class A>
struct Tally {
  double loss = 0, denominator = 0;
  Watch<T> target;
  Watch<A> input;
};

// In shared memory. All that comes after the warps' own sums is in functions that are not inlined and take no
// more than this: it would be most of every kernel's code.
struct BlockScratch {
  Record target_found[kWarps], input_found[kWarps];
  Partial partials[kWarps];  // of the warps; the first becomes the block's
  Finish finish;
  bool any[kWarps];
  bool last;
  bool full;  // the mail holds a report that nobody has read yet
};

// V: of the target's values.
template <class V>
__device__ __forceinline__ void add(Partial& a, const Partial& b) {
  a.loss += b.loss;
  a.denominator += b.denominator;
  a.target.seen += b.target.seen;
  if (get<V>(b.target.low) < get<V>(a.target.low)) a.target.low = b.target.low;
  if (get<V>(b.target.high) > get<V>(a.target.high)) a.target.high = b.target.high;
  a.input.seen += b.input.seen;
  if (b.input.low.d < a.input.low.d) a.input.low = b.input.low;
  if (b.input.high.d > a.input.high.d) a.input.high = b.input.high;
  a.target_bad |= b.target_bad;
  a.input_bad |= b.input_bad;
}

template <class V>
__device__ __forceinline__ Partial nothing() {
  Partial p{};
  p.target.low = as_value(kHighest<V>);
  p.target.high = as_value(kLowest<V>);
  p.input.low = as_value(kHighest<double>);
  p.input.high = as_value(kLowest<double>);
  return p;
}

// One partial a thread into one a warp, in a fixed order.
template <class V>
__device__ __forceinline__ void sum_warp(Partial p, const Finish& f, BlockScratch& s) {
  p.loss = sum_over(p.loss);
  p.denominator = sum_over(p.denominator);
  p.target.seen = sum_over(p.target.seen);
  p.target.low = as_value(least_of(get<V>(p.target.low)));
  p.target.high = as_value(greatest_of(get<V>(p.target.high)));
  if (f.watch_input) {
    p.input.seen = sum_over(p.input.seen);
    p.input.low.d = least_of(p.input.low.d);
    p.input.high.d = greatest_of(p.input.high.d);
  }
  p.target_bad = __any_sync(kAllLanes, p.target_bad);
  p.input_bad = __any_sync(kAllLanes, p.input_bad);
  if (lane_id() == 0) s.partials[warp_id()] = p;
}
// Those of the warps into the first, by the whole block.
template <class V>
__device__ __forceinline__ void sum_block(BlockScratch& s) {
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int w = 1; w < kWarps; ++w) add<V>(s.partials[0], s.partials[w]);
  }
  __syncthreads();
}

// By the whole block: the records of those warps that have `any`, in one.
template <class V>
__device__ __noinline__ void merge_warps(BlockScratch* s, const Record* found, Record* to) {
  __syncthreads();
  if (warp_id() == 0) merge_records<V>(*to, found, 0, kWarps, 1, [&](int w) { return s->any[w]; });
  __syncthreads();
}

// By the whole block, when its warps have been summed: it becomes part `part` of the result.
template <class V>
__device__ __noinline__ void contribute_block(BlockScratch* s, int part) {
  __syncthreads();
  const bool target_any = lane_id() == 0 && s->partials[warp_id()].target_bad;
  const bool input_any = lane_id() == 0 && s->partials[warp_id()].input_bad;
  const Scratch& to = s->finish.scratch;
  if (__syncthreads_or(target_any)) {
    if (lane_id() == 0) s->any[warp_id()] = target_any;
    merge_warps<V>(s, s->target_found, to.target_found + part);
  }
  if (__syncthreads_or(input_any)) {
    if (lane_id() == 0) s->any[warp_id()] = input_any;
    merge_warps<double>(s, s->input_found, to.input_found + part);
  }
  sum_block<V>(*s);
  if (threadIdx.x == 0) to.partials[part] = s->partials[0];
  __syncthreads();
}

// V: of the target's values as they are reported.
template <class V, class T, class A>
__device__ __forceinline__ void sum_tally(const Tally<T, A>& tally, const Finish& f, BlockScratch& s) {
  Partial p{};
  p.loss = tally.loss;
  p.denominator = tally.denominator;
  p.target = {tally.target.seen, as_value(V(tally.target.low)), as_value(V(tally.target.high))};
  p.input = {tally.input.seen, as_value(double(tally.input.low)), as_value(double(tally.input.high))};
  p.target_bad = tally.target.any;
  p.input_bad = tally.input.any;
  sum_warp<V>(p, f, s);
  if (threadIdx.x == 0) s.finish = f;
}

// By the whole block: true in the one that comes last, which then sees what the others wrote.
__device__ __forceinline__ bool arrive(BlockScratch& s) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    s.last = atomicAdd(s.finish.scratch.ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (s.last) __threadfence();
  return s.last;
}

// By the last block: merges what the blocks found about one tensor; warp 0 writes the section.
template <class V>
__device__ __noinline__ void write_section(BlockScratch* s, int parts, Subject subject) {
  const Finish& f = s->finish;
  const bool of_target = subject == Subject::target;
  const Record* const records = of_target ? f.scratch.target_found : f.scratch.input_found;
  // Each warp has every kWarps-th block.
  const bool any = merge_records<V>(s->target_found[warp_id()], records, warp_id(), parts, kWarps, [&](int part) {
    const Partial& p = f.scratch.partials[part];
    return of_target ? p.target_bad : p.input_bad;
  });
  if (lane_id() == 0) s->any[warp_id()] = any;
  merge_warps<V>(s, s->target_found, &s->input_found[0]);
  if (warp_id() == 0) {
    const Record& found = s->input_found[0];
    const Partial::Seen& seen = of_target ? s->partials[0].target : s->partials[0].input;
    const int64_t all = of_target ? f.target_seen : f.input_seen;
    Violations& report = *f.scratch.report;
    Section& section = report.sections[report.count];
    const int lane = lane_id();
    const int64_t count = sum_over(lane < kKinds ? found.counters[lane] : 0);
    const int listed = __popc(__ballot_sync(kAllLanes, lane < kListed && found.index[lane] != kNowhere));
    if (lane < kKinds) section.kinds[lane] = found.counters[lane];
    if (lane >= kKinds && lane < kCounters) section.well_known[lane - kKinds] = found.counters[lane];
    if (lane < kListed) {
      const int64_t index = found.index[lane];
      const bool by_row = !of_target && f.classes && lane < listed;
      section.index[lane] = by_row ? element_index(index / f.classes, index % f.classes, f.classes, f.inner) : index;
      section.value[lane] = found.value[lane];
    }
    if (lane == 0) {
      section.subject = subject;
      section.check = of_target ? f.target_check : f.input_check;
      section.seen = all >= 0 ? all : seen.seen;
      section.count = count;
      section.offender_min = found.low;
      section.offender_max = found.high;
      section.has_offender_range = get<V>(found.low) <= get<V>(found.high);
      section.valid_min = seen.low;
      section.valid_max = seen.high;
      section.has_valid_range = get<V>(seen.low) <= get<V>(seen.high);
      section.listed = listed;
    }
    __syncwarp();
    if (lane == 0) ++report.count;
  }
  __syncthreads();
}

// By the last block: the report goes to the device's copy, then to the host, its flag after it, the bell last of all.
template <class V>
__device__ __noinline__ void send_report(BlockScratch* s, int parts) {
  const Finish& f = s->finish;
  volatile Mail* const mail = f.mail;
  if (threadIdx.x == 0) {
    f.scratch.report->count = 0;
    s->full = mail->flag;
  }
  __syncthreads();
  if (s->full) {
    if (threadIdx.x == 0) mail->lost = mail->lost + 1;  // launches that share a mail follow each other
  } else {
    if (s->partials[0].target_bad) write_section<V>(s, parts, Subject::target);
    if (s->partials[0].input_bad) write_section<double>(s, parts, Subject::input);
    const auto* from = reinterpret_cast<const int64_t*>(f.scratch.report);
    auto* to = reinterpret_cast<volatile int64_t*>(&f.mail->violations);
    for (unsigned i = threadIdx.x; i < sizeof(Violations) / sizeof(int64_t); i += kThreads) to[i] = from[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      LG_STORE_SYSTEM(&f.mail->flag, 1);
    }
  }
  if (threadIdx.x == 0) {
    __threadfence_system();
    LG_STORE_SYSTEM(f.bell, 1);
  }
}

// By the last block.
template <class V>
__device__ __noinline__ void conclude(BlockScratch* s, int parts) {
  const Finish& f = s->finish;
  Partial mine = nothing<V>();
#pragma unroll 1
  for (int part = int(threadIdx.x); part < parts; part += kThreads) add<V>(mine, f.scratch.partials[part]);
  sum_warp<V>(mine, f, *s);
  sum_block<V>(*s);
  if (threadIdx.x == 0) {
    Partial& total = s->partials[0];
    if (f.zero_if_weightless && total.denominator == 0) total.loss = 0;
    if (f.loss) f.loss.store(0, f.mean ? total.loss / total.denominator : total.loss);
    f.tail.store(kDenominator, total.denominator);
    f.tail.store(kStrict, double(f.strict));
    f.tail.store(kCheckFinite, double(f.check_finite));
    *f.scratch.ticket = 0;
  }
  if (s->partials[0].target_bad || s->partials[0].input_bad) send_report<V>(s, parts);
}

template <class V>
__device__ __noinline__ void finish_block(BlockScratch* s) {
  contribute_block<V>(s, int(blockIdx.x));
  if (arrive(*s)) conclude<V>(s, int(gridDim.x));
}

// The end of a forward, by the whole block.
template <class V, class T, class A>
__device__ __forceinline__ void finish(const Tally<T, A>& tally, const Finish& f, BlockScratch& s) {
  sum_tally<V>(tally, f, s);
  finish_block<V>(&s);
}

}  // namespace lossguard::cuda
