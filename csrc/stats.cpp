#include "stats.h"

#include <pthread.h>

#include <chrono>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace lossguard::stats {
namespace {

struct Key {
  int64_t site;
  std::string_view loss;  // one of four, never freed

  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& key) const { return size_t(key.site) * 31 + key.loss.size(); }
};
struct State {
  std::mutex mutex;
  std::unordered_map<Key, Counts, Hash> counts;
};
State* state = new State;
// The child of a fork begins anew: another thread of its parent may have been in the middle of this.
const int registered = pthread_atfork(nullptr, nullptr, [] { state = new State; });

}  // namespace

void count(int64_t site, const char* loss, int64_t elements) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  Counts& c = state->counts[{site, loss}];
  ++c.calls;
  c.elements += elements;
}

void count_bad(int64_t site, std::string_view loss, int64_t violations) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  const auto counted = state->counts.find({site, loss});
  if (counted == state->counts.end()) return;  // since reset
  Counts& c = counted->second;
  ++c.bad_calls;
  c.violations += violations;
  c.last_bad = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::map<std::pair<int64_t, std::string>, Counts> counts() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  std::map<std::pair<int64_t, std::string>, Counts> all;
  for (const auto& [key, c] : state->counts) all[{key.site, std::string(key.loss)}] = c;
  return all;
}

void reset() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->counts.clear();
}

}  // namespace lossguard::stats
