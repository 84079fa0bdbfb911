#include "stats.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace lossguard::stats {
namespace {

// By the address of the loss's name: there are four.
struct Key {
  int64_t site;
  const char* loss;

  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& key) const { return size_t(key.site) * 31 + reinterpret_cast<size_t>(key.loss); }
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

std::map<std::pair<int64_t, std::string>, Counts> counts() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  std::map<std::pair<int64_t, std::string>, Counts> all;
  for (const auto& [key, c] : state->counts) all[{key.site, key.loss}] = c;
  return all;
}

void reset() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->counts.clear();
}

}  // namespace lossguard::stats
