// Losses in flight in several streams: the emulator runs their work late, one stream's between another's, in an order
// that the seed chooses.
//
//   streams CASE [SEEDS]      streams      # prints the cases
//
// Prints what is wrong.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <variant>

#include "../emulator.h"
#include "call.h"
#include "fill.h"

namespace drivers {
namespace {

constexpr int kStreams = 3;
constexpr Policy kRaise = {true, false, OnViolation::raise}, kSkip = {true, false, OnViolation::skip};

std::atomic<int> failures{0};
void check(const std::string& wrong, const char* what, uint64_t seed) {
  if (wrong.empty()) return;
  if (++failures <= 20) std::printf("%s, seed %d: %s\n", what, int(seed), wrong.c_str());
}
std::string words(cuda::Error error) { return error ? error : ""; }

cudaStream_t stream(int i) {
  static cudaStream_t* const streams = [] {
    auto* all = new cudaStream_t[kStreams];
    for (int s = 0; s < kStreams; ++s) cudaStreamCreateWithFlags(&all[s], cudaStreamNonBlocking);
    return all;
  }();
  return streams[i];
}

// ---- losses of several blocks each, which use all of a workspace

using AnyCall = std::variant<Call<Rows>, Call<Elements>>;

Call<Rows> row_call(bool nll, bool probabilities, DType dtype, Sizes sizes, Flags flags, Random& random) {
  Rows a;
  a.nll = nll;
  a.flags = flags;
  a.probabilities = probabilities;
  a.input = Tensor(dtype, sizes);
  a.target = probabilities ? Tensor(dtype, sizes) : Tensor(DType::i64, {sizes[0]});
  fill(a, Harm::some, random);
  return Call<Rows>(a, {}, random.next());
}
Call<Elements> element_call(DType dtype, int64_t n, Flags flags, Random& random) {
  Elements a;
  a.flags = flags;
  a.input = Tensor(dtype, {n});
  a.target = Tensor(dtype, {n});
  fill(a, Harm::some, random);
  return Call<Elements>(a, {}, random.next());
}
std::vector<AnyCall> losses(Policy policy, uint64_t seed) {
  Random random(seed);
  const Flags mean = {Reduction::mean, false, policy, true, false}, none = {Reduction::none, false, policy, true, false};
  std::vector<AnyCall> calls;
  calls.push_back(row_call(false, false, DType::f32, {400, 5}, mean, random));
  calls.push_back(row_call(false, true, DType::f32, {1, 3 * 256 * 4 + 5}, mean, random));  // three blocks
  calls.push_back(row_call(true, false, DType::f64, {300, 7}, none, random));
  calls.push_back(element_call(DType::f32, 5000, mean, random));
  return calls;
}

std::string forward(AnyCall& call, cudaStream_t stream) {
  return std::visit([&](auto& c) { return words(c.forward({0, stream})); }, call);
}
std::string backward(const AnyCall& call, cudaStream_t stream) {
  return std::visit([&](const auto& c) { return words(c.backward({0, stream})); }, call);
}
std::string wrong(AnyCall& call) {
  std::visit([](auto& c) { c.ask(true); }, call);
  return std::visit([](const auto& c) { return c.wrong(); }, call);
}
std::string wait_for_report(AnyCall& call) {
  return std::visit([](auto& c) { return words(c.wait()); }, call);
}
std::string wrong_report(const AnyCall& call) {
  return std::visit([](const auto& c) { return c.wrong_report(); }, call);
}
std::string wait_for(cudaStream_t stream) { return words(cudaStreamSynchronize(stream) ? "a stream failed" : nullptr); }

// ---- cases

// From one host thread, which waits for nothing before everything is in its queue.
void in_flight(uint64_t seed) {
  std::vector<std::vector<AnyCall>> calls;
  for (int s = 0; s < kStreams; ++s) {
    calls.push_back(losses(kSkip, seed * kStreams + uint64_t(s)));
    std::vector<AnyCall> first = losses(kSkip, 0);
    check(forward(first[0], stream(s)), "a stream's first loss", seed);  // makes its workspace
    check(wait_for(stream(s)), "wait", seed);
  }
  cuda_emulator::clear_launch_log();
  for (size_t i = 0; i < calls[0].size(); ++i)
    for (int s = 0; s < kStreams; ++s) check(forward(calls[s][i], stream(s)), "forward", seed);
  for (size_t i = 0; i < calls[0].size(); ++i)
    for (int s = 0; s < kStreams; ++s) check(backward(calls[s][i], stream(s)), "backward", seed);
  check(cuda_emulator::launch_log().empty() ? "" : "something has run already", "before the first wait", seed);
  for (int i = 0; i < kStreams; ++i) {
    const int s = int((seed + uint64_t(i)) % kStreams);
    check(wait_for(stream(s)), "wait", seed);
    for (AnyCall& call : calls[s]) check(wrong(call), "in flight", seed);
  }
}

// From a thread for each stream. All losses have something to report, which reaches the host when it waits.
void host_threads(uint64_t seed) {
  std::vector<std::thread> threads;
  for (int s = 0; s < kStreams; ++s)
    threads.emplace_back([s, seed] {
      for (AnyCall& call : losses(kRaise, seed * kStreams + uint64_t(s))) {
        check(forward(call, stream(s)), "forward", seed);
        check(wait_for_report(call), "wait for a report", seed);
        check(wrong_report(call), "report", seed);
        check(backward(call, stream(s)), "backward", seed);
        check(wait_for(stream(s)), "wait", seed);
        check(wrong(call), "of a host thread", seed);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// The backward in another stream than the forward. Without an event it may run first: what it reads then is anybody's
// guess, and TSan's to see.
void handed_over(uint64_t seed, bool by_event) {
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  std::vector<AnyCall> calls = losses(kSkip, seed);
  for (AnyCall& call : calls) {
    check(forward(call, stream(0)), "forward", seed);
    if (by_event) {
      cudaEventRecord(event, stream(0));
      cudaStreamWaitEvent(stream(1), event, 0);
    }
    check(backward(call, stream(1)), "backward", seed);
  }
  check(wait_for(stream(1)), "wait", seed);
  if (!by_event) check(wait_for(stream(0)), "wait", seed);
  for (AnyCall& call : calls)
    if (by_event) check(wrong(call), "handed over", seed);
  cudaEventDestroy(event);
}

// Graphs of all losses, each launched twice, and in two streams, between the others'. The second time the mail is full.
void replayed(uint64_t seed) {
  struct Graph {
    std::vector<AnyCall> calls;
    std::vector<std::vector<double>> scratch;  // of each call
    cudaGraphExec_t executable;
  };
  std::vector<Graph> graphs(kStreams);
  int64_t bytes = 0;
  check(words(cuda::scratch_size(0, bytes)), "scratch", seed);
  for (int g = 0; g < kStreams; ++g) {
    graphs[g].calls = losses(kRaise, seed * kStreams + uint64_t(g));
    cudaStreamBeginCapture(stream(g), cudaStreamCaptureModeGlobal);
    for (AnyCall& call : graphs[g].calls) {
      // Filled with anything: it is the pool's, and others use it between replays.
      void* const scratch = graphs[g].scratch.emplace_back(size_t(bytes) / sizeof(double), 0.1).data();
      check(std::visit([&](auto& c) { return words(c.forward({0, stream(g), true, scratch})); }, call), "forward", seed);
      check(std::visit([&](auto& c) { return words(c.backward({0, stream(g), true})); }, call), "backward", seed);
    }
    cudaGraph_t graph;
    check(cudaStreamEndCapture(stream(g), &graph) ? "the capture was spoiled" : "", "capture", seed);
    cudaGraphInstantiate(&graphs[g].executable, graph);
    cudaGraphDestroy(graph);
  }
  check(cuda_emulator::launch_log().empty() ? "" : "something has run already", "while recording", seed);
  for (int round = 0; round < 2; ++round)
    for (int g = 0; g < kStreams; ++g)
      cudaGraphLaunch(graphs[g].executable, stream(int((seed + uint64_t(g + round)) % kStreams)));
  for (int s = 0; s < kStreams; ++s) check(wait_for(stream(s)), "wait", seed);
  for (Graph& graph : graphs) {
    for (AnyCall& call : graph.calls) {
      check(wrong(call), "replayed", seed);
      const int64_t lost = std::visit([](const auto& c) { return c.lost; }, call);
      check(lost == 1 ? "" : std::to_string(lost) + " reports were lost instead of 1", "replayed", seed);
    }
    cudaGraphExecDestroy(graph.executable);
  }
  cuda_emulator::clear_launch_log();
}

// The host looks into the mail, and waits for nothing, after each word that reaches it.
void watched(uint64_t seed) {
  cuda_emulator::set_late_execution(false);
  cuda_emulator::hold_events(true);
  for (AnyCall& call : losses(kRaise, seed)) {
    check(forward(call, stream(0)), "forward", seed);
    std::visit(
        [&](auto& c) {
          int words_that_came = 0;
          for (; c.slot && cuda_emulator::publish_next_word(); ++words_that_came) c.ask(false);
          check(c.slot ? "nothing was said" : "", "watched", seed);
          check(words_that_came > 10 ? "" : "it came at once", "watched", seed);
        },
        call);
    check(wrong_report(call), "watched", seed);
    check(wait_for(stream(0)), "wait", seed);  // before its tensors go
  }
  cuda_emulator::hold_events(false);
}

const struct {
  const char* name;
  void (*run)(uint64_t seed);
} kCases[] = {
    {"in flight", in_flight},
    {"host threads", host_threads},
    {"watched", watched},
    {"replayed", replayed},
    {"handed over", [](uint64_t seed) { handed_over(seed, true); }},
    {"handed over without an event", [](uint64_t seed) { handed_over(seed, false); }},
};

}  // namespace
}  // namespace drivers

int main(int argc, char** argv) {
  using namespace drivers;
  const int seeds = argc > 2 ? std::atoi(argv[2]) : 1;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was wrong before a crash is not lost
  cuda_emulator::set_devices(1, 2);
  for (const auto& entry : kCases) {
    if (argc < 2) std::printf("%s\n", entry.name);
    if (argc < 2 || std::strcmp(argv[1], entry.name)) continue;
    cuda_emulator::set_late_execution(true);
    for (int seed = 1; seed <= seeds; ++seed) {
      cuda_emulator::set_schedule(cuda_emulator::Schedule::random, uint64_t(seed));
      entry.run(uint64_t(seed));
    }
    cuda_emulator::set_late_execution(false);
    std::printf("%d seeds, %d wrong\n", seeds, failures.load());
    return failures || seeds < 1 ? 1 : 0;
  }
  return 2;
}
