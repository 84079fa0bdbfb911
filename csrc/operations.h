// The operations whose indices `check_index` checks, by the number that it is given.
#pragma once

namespace lossguard {

constexpr const char* kOperations[] = {
    "embedding",  "embedding_bag", "gather", "scatter", "index_select", "index_add",
    "index_copy", "index_fill",    "take",   "one_hot", "indexing",
};

}  // namespace lossguard
