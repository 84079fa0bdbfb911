#include "pending.h"

#if defined(LOSSGUARD_WITH_CUDA)
#include <pthread.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "torch_stream.h"

namespace lossguard::pending {

std::atomic<int64_t> count{0};

namespace {

// A thread that launches, steps, or both.
struct Thread {
  std::atomic<bool> alive{true};
  std::atomic<bool> steps{false};  // it has optimizers of its own
};
const std::shared_ptr<Thread>& this_thread() {
  static thread_local const struct Mark {
    std::shared_ptr<Thread> thread = std::make_shared<Thread>();
    ~Mark() { thread->alive = false; }
  } mark;
  return mark.thread;
}

// Whose business it is.
struct Owner {
  std::shared_ptr<Thread> thread;
  bool alone;  // it waits for the answer itself
};
struct Launch {
  cuda::Place place;
  cuda::Slot* slot;
  Call call;
  Owner owner;
};
struct Found {
  Finding finding;
  Owner owner;
};

// Of all threads. Never destroyed: some may outlive the statics.
struct State {
  std::mutex mutex;
  std::deque<Launch> launches;  // about in the order in which they were made
  std::deque<Launch> shared;    // of a slot the last: captured ones, and those beyond the last slot
  std::vector<Found> found;
  std::vector<Found> told;  // to another thread than the one that launched it, which may be about to step on it
};
State* state = new State;
constexpr size_t kMostTold = 64;

// The child of a fork begins anew: none of the parent's launches is its own.
void after_fork() {
  state = new State;
  count = 0;
}

// Whether this thread is to be told of what `other` launched. A thread that steps its own optimizers hears of its own
// batches; what was launched by one that does not, like a replica's, is everybody's business.
bool concerns_us(const Owner& owner, Moment moment) {
  const Thread& other = *owner.thread;
  if (owner.thread == this_thread() || !other.alive) return true;
  return !owner.alone && (!other.steps || moment == Moment::check || moment == Moment::exit);
}

void update_count(State& s) {
  count = int64_t(s.launches.size() + s.shared.size() + s.found.size() + s.told.size());
}

// Looks into the mail of every launch. Those that had something to say leave the list, and those that are over, where
// `query` has CUDA asked whether they are.
template <class Query>
void sweep(State& s, const Query& query) {
  const auto look_at = [&](const Launch& l) {
    Violations violations;
    int64_t lost = 0;
    const cuda::Answer answer = cuda::ask(*l.slot, query(l), violations, lost);
    if (answer != cuda::Answer::wrong) return answer;
    if (cuda::is_shared(*l.slot) && !l.place.capturing) {  // by any of those that had no slot of their own
      violations = {};
      ++lost;
    }
    s.found.push_back({{l.call, violations, lost, l.place.capturing}, l.owner});
    return answer;
  };
  std::erase_if(s.launches, [&](const Launch& l) {
    if (look_at(l) == cuda::Answer::none_yet) return false;
    cuda::give_back(*l.slot);
    return true;
  });
  std::erase_if(s.shared, [&](const Launch& l) {
    const bool abandoned = cuda::is_abandoned(*l.slot);
    look_at(l);
    if (abandoned) cuda::give_back(*l.slot);
    return abandoned;
  });
  update_count(s);
}

std::vector<Finding> take(State& s, Moment moment) {
  std::vector<Finding> ours;
  std::erase_if(s.found, [&](Found& f) {
    if (!concerns_us(f.owner, moment)) return false;
    ours.push_back(f.finding);
    if (f.owner.thread != this_thread()) s.told.push_back(std::move(f));
    return true;
  });
  std::erase_if(s.told, [&](Found& f) {
    const bool stepped_on = moment == Moment::step && f.owner.thread == this_thread();
    if (stepped_on) ours.push_back(std::move(f.finding));
    return stepped_on || !f.owner.thread->alive;
  });
  if (s.told.size() > kMostTold) s.told.erase(s.told.begin());
  update_count(s);
  return ours;
}

void tell(const std::vector<Finding>& findings, Moment moment) {
  if (!findings.empty()) deliver(findings, moment);
}

}  // namespace

void add(const cuda::Place& place, cuda::Slot& slot, Call&& call) {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  static_cast<void>(registered);
  static const std::shared_ptr<Thread>& nobody = *new std::shared_ptr<Thread>(new Thread{false});
  State& s = *state;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const bool alone = call.flags.policy.when == When::immediately;
  // Whoever replays a graph, it need not be the one who recorded it.
  const std::shared_ptr<Thread> thread = place.capturing ? nobody : this_thread();
  Launch launch{place, &slot, std::move(call), {thread, alone}};
  if (cuda::is_shared(slot)) {
    std::erase_if(s.shared, [&](const Launch& l) { return l.slot == &slot; });
    s.shared.push_back(std::move(launch));
  } else {
    s.launches.push_back(std::move(launch));
  }
  update_count(s);
}

void look(Moment moment) {
  State& s = *state;
  std::vector<Finding> ours;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    // A forward makes room for itself: it asks for the two oldest, and adds one.
    int queries = moment == Moment::a_call ? 2 : 0;
    const bool rang = cuda::bell_rang();
    if (rang || queries) sweep(s, [&](const Launch&) { return queries-- > 0; });
    if (s.found.empty()) return;
    ours = take(s, moment);
  }
  tell(ours, moment);
}

bool any_at_step() {
  this_thread()->steps.store(true, std::memory_order_relaxed);
  return count.load(std::memory_order_relaxed);
}

void wait(Until until, Moment moment) {
  if (!count.load(std::memory_order_relaxed)) return;
  State& s = *state;
  const std::shared_ptr<Thread>& self = this_thread();
  const auto awaited = [&](const Launch& l) {
    if (until == Until::all) return true;
    if (until == Until::own) return l.owner.thread == self || l.place.capturing;
    return l.call.flags.needs_grad && concerns_us(l.owner, moment);
  };
  std::vector<cuda::Slot*> slots;
  std::set<std::pair<int, void*>> streams;
  std::map<int, cuda::Place> now;  // by device
  std::set<int> captured;          // devices
  bool capturing = false;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto note = [&](const Launch& l) {
      if (!awaited(l) || cuda::is_abandoned(*l.slot)) return;
      const int device = l.place.device;
      if (!now.count(device)) now[device] = current_place(device);
      capturing = capturing || now[device].capturing;
      if (l.place.capturing) {
        captured.insert(device);
        return;
      }
      slots.push_back(l.slot);
      streams.insert({l.place.device, l.place.stream});
    };
    for (const Launch& l : s.launches) note(l);
    for (const Launch& l : s.shared) note(l);
  }
  if (capturing) return;  // a step that is recorded: what it waits for would be recorded with it
  // Without the lock: others go on launching. A slot that is in use again by then is waited for a little longer.
  // The youngest first: when it is over, the others of its stream are, and need no wait.
  cuda::Error error = nullptr;
  for (auto slot = slots.rbegin(); slot != slots.rend() && !error; ++slot) error = cuda::wait(**slot);
  // A replay is in the stream that is current now, or one that this waits for.
  for (const int device : captured)
    if (!error) error = cuda::drain(now[device]);
  std::vector<Finding> ours;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (error) {  // the device is lost, and with it what its launches had to say
      s.launches.clear();
      update_count(s);
    } else {
      cuda::bell_rang();
      sweep(s, [&](const Launch& l) { return streams.count({l.place.device, l.place.stream}) > 0; });
      ours = take(s, moment);
    }
  }
  if (error) throw std::runtime_error(std::string("lossguard on CUDA: ") + error);
  tell(ours, moment);
}

}  // namespace lossguard::pending
#endif
