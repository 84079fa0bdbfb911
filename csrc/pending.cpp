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

// The threads alive that have launched a forward or stepped. One alone, as almost always, need not be told apart.
std::atomic<int> threads{0};
std::atomic<int> told{0};  // that another may have to be told yet

struct Mark {
  std::shared_ptr<Thread> thread = std::make_shared<Thread>();
  bool counted = false;
  ~Mark() {
    thread->alive = false;
    if (counted) --threads;
  }
};
Mark& mark() {
  static thread_local Mark of_thread;
  return of_thread;
}

// The owner of what is nobody's own: it concerns everybody.
const std::shared_ptr<Thread>& nobody() {
  static const std::shared_ptr<Thread>& thread = *new std::shared_ptr<Thread>(new Thread);
  return thread;
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
  const void* saved;  // what its backward will come with; none once that has begun

  bool has_gradients() const { return call.flags.needs_grad && !saved; }
};
struct Found {
  Finding finding;
  Owner owner;
  const void* saved;

  bool has_gradients() const { return finding.call.flags.needs_grad && !saved; }
};
// Told to a thread that may not be the one whose optimizer has the gradients.
struct Told {
  Found found;
  std::vector<std::shared_ptr<Thread>> threads;  // that know
  std::vector<int64_t> optimizers;               // about whose step one was told
};

// Of all threads. Never destroyed: some may outlive the statics.
struct State {
  std::mutex mutex;
  std::deque<Launch> launches;  // about in the order in which they were made
  std::deque<Launch> shared;    // of a slot the last: captured ones, and those beyond the last slot
  std::vector<Found> found;
  std::vector<Told> told;
};
State* state = new State;
constexpr size_t kMostTold = 64, kMostOptimizers = 64;

// The child of a fork begins anew: none of the parent's launches is its own.
void after_fork() {
  state = new State;
  count = told = 0;
  threads = mark().counted;
}

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

// Who asks: at the step of an optimizer, that one's number.
struct Asker {
  std::shared_ptr<Thread> self;  // none: a backward that torch runs on a thread of its own, for the only thread there is
  Moment moment;
  int64_t optimizer = 0;
};

// Whether the optimizer about to step may have the gradients of what is `owner`'s, because the owner steps none, or
// has stepped this one as well.
bool may_be_stepped_on(const Owner& owner, const Asker& who) {
  const Thread& other = *owner.thread;
  return !other.alive || other.optimizers.empty() ||
         (who.moment == Moment::step && contains(other.optimizers, who.optimizer));
}

// Whether the one who asks is to be told. A thread with optimizers of its own hears of its own batches; what belongs to
// one that has none, like a replica's, is everybody's business, unless nobody can step on it for want of gradients.
bool concerns(const Asker& who, const Owner& owner, bool needs_grad) {
  if (!who.self || owner.thread == who.self || !owner.thread->alive) return true;
  if (who.moment == Moment::check || who.moment == Moment::exit) return !owner.alone;
  return !owner.alone && (needs_grad || owner.thread == nobody()) && may_be_stepped_on(owner, who);
}

void update_count(State& s) {
  count = int64_t(s.launches.size() + s.shared.size() + s.found.size());
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
    s.found.push_back({{l.call, violations, lost, l.place.capturing}, l.owner, l.saved});
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

std::vector<Finding> take(State& s, const Asker& who) {
  std::vector<Finding> ours;
  // It may have been another optimizer's, of another thread: that, too, must not step on it.
  if (who.moment == Moment::step) {
    for (Told& t : s.told) {
      if (t.found.owner.thread != who.self && !may_be_stepped_on(t.found.owner, who)) continue;
      if (contains(t.threads, who.self)) continue;
      t.threads.push_back(who.self);  // also where it was this optimizer's: then it is dealt with
      if (contains(t.optimizers, who.optimizer)) continue;
      t.optimizers.push_back(who.optimizer);
      ours.push_back(t.found.finding);
      ours.back().again = true;
    }
  }
  std::erase_if(s.found, [&](Found& f) {
    if (!concerns(who, f.owner, f.finding.call.flags.needs_grad)) return false;
    ours.push_back(f.finding);
    if (who.self && f.owner.thread != who.self && f.finding.call.flags.needs_grad) {
      s.told.push_back({std::move(f), {who.self}, {}});
      if (who.moment == Moment::step) s.told.back().optimizers.push_back(who.optimizer);
    }
    return true;
  });
  std::erase_if(s.told, [](const Told& t) {
    return std::count_if(t.threads.begin(), t.threads.end(), [](const auto& thread) { return thread->alive.load(); }) >=
           threads;
  });
  if (s.told.size() > kMostTold) s.told.erase(s.told.begin(), s.told.end() - kMostTold);
  told = int(s.told.size());
  update_count(s);
  return ours;
}

void note_step(Thread& self, int64_t optimizer) {
  std::vector<int64_t>& all = self.optimizers;
  if (!all.empty() && all.back() == optimizer) return;
  std::erase(all, optimizer);
  all.push_back(optimizer);
  if (all.size() > kMostOptimizers) all.erase(all.begin());
}

void tell(const std::vector<Finding>& findings, Moment moment) {
  if (!findings.empty()) deliver(findings, moment);
}

}  // namespace

const std::shared_ptr<Thread>& this_thread() { return mark().thread; }

namespace {

// Who called for the backward that runs on this thread.
std::shared_ptr<Thread> runner_of_backward() {
  std::shared_ptr<Thread> runner = thread_of_backward();
  return runner ? runner : this_thread();
}

// This thread launches or steps. Where it is the second that does, the backwards until now may have been either's.
void count_thread() {
  Mark& m = mark();
  if (m.counted) return;
  m.counted = true;
  if (threads++ != 1) return;
  watch_backwards();
  State& s = *state;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto disown = [](auto& l) {
    if (l.has_gradients() && !l.owner.alone) l.owner.thread = nobody();
  };
  std::for_each(s.launches.begin(), s.launches.end(), disown);
  std::for_each(s.shared.begin(), s.shared.end(), disown);
  std::for_each(s.found.begin(), s.found.end(), disown);
}

}  // namespace

void add(const cuda::Place& place, cuda::Slot& slot, const void* saved, Call&& call) {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  static_cast<void>(registered);
  // A forward computed anew for a backward, on whatever thread torch runs that, is its caller's.
  std::shared_ptr<Thread> thread = this_thread();
  if (!call.flags.recomputed) count_thread();
  else if (threads > 1) thread = runner_of_backward();
  if (place.capturing) thread = nobody();  // whoever replays a graph, it need not be the one who recorded it
  State& s = *state;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const bool alone = call.flags.policy.when == When::immediately;
  const bool has_backward = call.flags.needs_grad && !place.capturing;
  Launch launch{place, &slot, std::move(call), {thread, alone}, has_backward ? saved : nullptr};
  if (cuda::is_shared(slot)) {
    std::erase_if(s.shared, [&](const Launch& l) { return l.slot == &slot; });
    s.shared.push_back(std::move(launch));
  } else {
    s.launches.push_back(std::move(launch));
  }
  update_count(s);
}

namespace {

void look_as(const Asker& who) {
  State& s = *state;
  std::vector<Finding> ours;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    // A forward makes room for itself: it asks for the two oldest, and adds one.
    int queries = who.moment == Moment::a_call ? 2 : 0;
    const bool rang = cuda::bell_rang();
    if (rang || queries) sweep(s, [&](const Launch&) { return queries-- > 0; });
    if (s.found.empty()) return;
    ours = take(s, who);
  }
  tell(ours, who.moment);
}

// The backward of what saved `saved` is run by `runner`, if it is known.
void attribute(State& s, const void* saved, const std::shared_ptr<Thread>& runner) {
  const auto is_the_one = [&](auto& l) {
    if (l.saved != saved) return false;
    l.saved = nullptr;
    if (runner && !l.owner.alone) l.owner.thread = runner;
    return true;
  };
  // The memory of what was saved is used again: the last to have it is the one.
  const auto last_of = [&](auto& all) { return std::any_of(all.rbegin(), all.rend(), is_the_one); };
  if (saved) static_cast<void>(last_of(s.launches) || last_of(s.shared) || last_of(s.found));
}

}  // namespace

void look(Moment moment) { look_as({this_thread(), moment}); }

void begin_backward(const void* saved) {
  if (!count.load(std::memory_order_relaxed)) return;
  std::shared_ptr<Thread> runner;  // with one thread there is no need to ask
  if (threads > 1) runner = runner_of_backward();
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    attribute(*state, saved, runner);
  }
  look_as({runner, Moment::backward});
}

bool any_at_step() {
  count_thread();
  // Of several threads it is noted which steps what.
  return count.load(std::memory_order_relaxed) || threads.load(std::memory_order_relaxed) > 1;
}

void wait(Until until, Moment moment, int64_t optimizer) {
  const Asker who{this_thread(), moment, optimizer};
  State& s = *state;
  if (moment == Moment::step) {
    const std::lock_guard<std::mutex> lock(s.mutex);
    note_step(*who.self, optimizer);
  }
  if (!count.load(std::memory_order_relaxed) && !told.load(std::memory_order_relaxed)) return;
  const auto awaited = [&](const Launch& l) {
    if (until == Until::all) return true;
    if (until == Until::own) return l.owner.thread == who.self || l.place.capturing;
    return l.call.flags.needs_grad && concerns(who, l.owner, true);
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
      ours = take(s, who);
    }
  }
  if (error) throw std::runtime_error(std::string("lossguard on CUDA: ") + error);
  tell(ours, moment);
}

}  // namespace lossguard::pending
#endif
