#include "launch.h"
#include "launchers.h"

namespace lossguard::cuda {

// cross_entropy_launch.h
template <class T>
Error launch_ce_forward(const RowLoss&, const View& loss, const Place&, const Workspace&, const MailHold&);
template <class T>
Error launch_ce_backward(const RowLoss&, const View& grad, const View& out, const Place&, const Workspace&);

Error cross_entropy_forward(const RowLoss& a, const View& loss, const Place& place, Violations& found) {
  return forward(a.flags, place, found, [&](const Workspace& w, const MailHold& mail) {
    return by_dtype(a.input.dtype, [&](auto t) { return launch_ce_forward<decltype(t)>(a, loss, place, w, mail); });
  });
}

Error cross_entropy_backward(const RowLoss& a, const View& grad, const View& out, const Place& place) {
  Workspace w;
  if (Error error = workspace_of(place, w)) return error;
  return by_dtype(a.input.dtype, [&](auto t) { return launch_ce_backward<decltype(t)>(a, grad, out, place, w); });
}

}  // namespace lossguard::cuda
