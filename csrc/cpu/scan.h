// The cold path: after a kernel has seen a violation, reads the tensors once more, in logical order,
// and writes the report. The checks are those of math/check.h, as in the kernels.
#pragma once
#include "../losses.h"
#include "../report.h"

namespace lossguard::cpu {

Violations scan(const ElementwiseLoss&);
Violations scan_cross_entropy(const RowLoss&);
Violations scan_nll(const RowLoss&);

}  // namespace lossguard::cpu
