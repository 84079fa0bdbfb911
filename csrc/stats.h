// How often each call site called which loss, and of how many elements.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace lossguard::stats {

struct Counts {
  int64_t calls = 0, elements = 0;
};

void count(int64_t site, const char* loss, int64_t elements);
std::map<std::pair<int64_t, std::string>, Counts> counts();
void reset();

}  // namespace lossguard::stats
