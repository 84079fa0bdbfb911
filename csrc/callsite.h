// Which line of the caller's code called, as a number that is cheap to take: the frames themselves are not kept, for
// they would keep the step's tensors alive.
#pragma once
#include <pybind11/pybind11.h>

namespace lossguard::callsite {

// Adds to the module: `call_site()`, a number above 0, the same for the same place in the same code, or 0 where no
// frame is the caller's own; `describe_site(number)`, (file, line, function); `set_internal(f)`, which says of a file
// name whether its code is not the caller's.
void add_to(pybind11::module_& m);

}  // namespace lossguard::callsite
