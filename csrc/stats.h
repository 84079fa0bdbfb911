// How often each call site called which loss, of how many elements, and what was wrong with them.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace lossguard::stats {

struct Counts {
  int64_t calls = 0, elements = 0;
  int64_t bad_calls = 0, violations = 0;
  double last_bad = 0;  // seconds since 1970
};

void count(int64_t site, const char* loss, int64_t elements);
void count_bad(int64_t site, std::string_view loss, int64_t violations);
std::map<std::pair<int64_t, std::string>, Counts> counts();
void reset();

}  // namespace lossguard::stats
