// pybind11: how violations reach Python, the policy in force, and facts about the build.
#include <pybind11/pybind11.h>

#include "callsite.h"
#include "cpu/kernels.h"
#include "operations.h"
#include "pending.h"
#include "policy.h"
#include "stats.h"
#if defined(LOSSGUARD_WITH_CUDA)
#include "torch_stream.h"
#endif

namespace py = pybind11;

namespace lossguard {
namespace {

// Set once at import and never released: they are used until the process ends.
PyObject* handler = nullptr;
PyObject* unsupported = nullptr;
PyObject* of_backward = nullptr;
PyObject* watch = nullptr;

py::object number(Check check, Value v) {
  return check == Check::class_index ? py::object(py::int_(v.i)) : py::object(py::float_(v.d));
}

py::dict describe(const Section& s) {
  py::list indices, values, kinds, well_known;
  for (int i = 0; i < s.listed; ++i) {
    indices.append(s.index[i]);
    values.append(number(s.check, s.value[i]));
  }
  for (int64_t n : s.kinds) kinds.append(n);
  for (int64_t n : s.well_known) well_known.append(n);
  py::dict d;
  d["subject"] = s.subject == Subject::target ? "target" : "input";
  d["check"] = int(s.check);
  d["seen"] = s.seen;
  d["count"] = s.count;
  d["kinds"] = kinds;
  d["well_known"] = well_known;
  d["indices"] = indices;
  d["values"] = values;
  if (s.has_offender_range)
    d["offender_range"] = py::make_tuple(number(s.check, s.offender_min), number(s.check, s.offender_max));
  if (s.has_valid_range)
    d["valid_range"] = py::make_tuple(number(s.check, s.valid_min), number(s.check, s.valid_max));
  return d;
}

py::tuple as_tuple(const std::vector<int64_t>& numbers) {
  py::tuple t(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) t[i] = numbers[i];
  return t;
}

py::tuple describe(const Given& given) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16", "int64", "uint8"};
  return py::make_tuple(as_tuple(given.shape), names[int(given.dtype)]);
}

py::dict describe(const Finding& finding) {
  const Call& call = finding.call;
  py::list sections;
  for (int i = 0; i < finding.violations.count; ++i) sections.append(describe(finding.violations.sections[i]));
  py::dict d;
  d["loss"] = call.loss;
  d["site"] = call.site;
  d["on_violation"] = int(call.flags.policy.on_violation);
  d["when"] = int(call.flags.policy.when);
  d["recomputed"] = call.flags.recomputed;
  d["wraps"] = call.flags.wraps;
  d["sections"] = sections;
  d["input"] = describe(call.input);
  d["target"] = describe(call.target);
  d["device"] = py::make_tuple(call.device_type, call.device_index);
  if (call.num_classes >= 0) d["num_classes"] = call.num_classes;
  d["ignore_index"] = call.ignore_index;
  d["samples"] = as_tuple(call.samples);
  d["lost"] = finding.lost;
  d["captured"] = finding.captured;
  d["again"] = finding.again;
  return d;
}

// ---- what an ordinary call needs: not through pybind11, which would cost it as much again

// Whether all there is to do is to raise what native torch checks as well.
PyObject* is_plain(PyObject*, PyObject* flags) {
  const Policy policy = decode(PyLong_AsLongLong(flags)).policy;
  return PyBool_FromLong(!policy.check_finite && policy.on_violation == OnViolation::raise);
}

// One that native NLL computed: (site, elements).
PyObject* count_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "count_call(site, elements)");
  stats::count(PyLong_AsLongLong(arguments[0]), "NLLLoss", PyLong_AsLongLong(arguments[1]));
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyMethodDef plain_functions[] = {
    {"is_plain", is_plain, METH_O, nullptr},
    {"count_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(count_call)), METH_FASTCALL, nullptr},
};

// python/lossguard/_violations.py, Moment
constexpr const char* kMoments[] = {"the call", "a call", "backward", "step", "check", "leave", "exit"};

}  // namespace

void deliver(const std::vector<Finding>& findings, Moment moment) {
  py::gil_scoped_acquire gil;
  py::list described;
  for (const Finding& finding : findings) described.append(describe(finding));
  const py::object exception = py::reinterpret_borrow<py::object>(handler)(described, kMoments[int(moment)]);
  if (exception.is_none()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

#if defined(LOSSGUARD_WITH_CUDA)
namespace pending {

using ThreadPointer = std::shared_ptr<Thread>;
constexpr char kThreadName[] = "lossguard thread";

std::shared_ptr<Thread> thread_of_backward() {
  py::gil_scoped_acquire gil;
  const py::object capsule = py::reinterpret_borrow<py::object>(of_backward)();
  if (capsule.is_none()) return nullptr;
  return *py::reinterpret_borrow<py::capsule>(capsule).get_pointer<ThreadPointer>();
}

void watch_backwards() {
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(watch)();
}

}  // namespace pending
#endif

void throw_unsupported(const std::string& why) {
  py::gil_scoped_acquire gil;
  PyErr_SetString(unsupported, why.c_str());
  throw py::error_already_set();
}

}  // namespace lossguard

PYBIND11_MODULE(_C, m) {
  using namespace lossguard;
  callsite::add_to(m);
  m.def("install", [](py::object handle, py::object unsupported_class) {
    handler = handle.release().ptr();
    unsupported = unsupported_class.release().ptr();
  });

  m.def("default_policy", &ambient::get_default);
  m.def("set_default_policy", &ambient::set_default);
  m.def("thread_policy", &ambient::get_local);
  m.def("set_thread_policy", &ambient::set_local);
  m.def("effective_policy", [](int64_t flags) { return decode(flags).policy.pack(); });

  m.def("cpu_kernels", [] {
    py::list names;
    for (const char* const* name = cpu::kernel_names(); *name; ++name) names.append(*name);
    return names;
  });
  m.def("cpu_kernels_in_use", [] { return cpu::kernels().name; });
  m.def("choose_cpu_kernels", [](const std::string& name) { return cpu::choose_kernels(name.c_str()); });
  m.def("build_info", [] {
    py::dict d;
    d["compiler"] = __VERSION__;
    d["pybind11"] = std::to_string(PYBIND11_VERSION_MAJOR) + "." + std::to_string(PYBIND11_VERSION_MINOR) + "." +
                    std::to_string(PYBIND11_VERSION_MICRO);
    d["torch_abi_floor"] = "2.10";
#if defined(LOSSGUARD_EMULATED)
    d["cuda"] = false;
    d["emulated"] = true;  // CPU tensors go through the CUDA kernels: tests/cuda_emulator
#elif defined(LOSSGUARD_WITH_CUDA)
    d["cuda"] = true;
    d["nvcc"] = LOSSGUARD_NVCC_VERSION;
    d["cuda_archs"] = LOSSGUARD_CUDA_ARCHS;
#else
    d["cuda"] = false;
#endif
    return d;
  });
  for (PyMethodDef& f : plain_functions)
    m.attr(f.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&f, nullptr));
  py::list operations;
  for (const char* name : kOperations) operations.append(name);
  m.attr("operations") = py::tuple(operations);
  // Of a class: that instances are no sequences, whatever `__getitem__` it inherits.
  m.def("clear_sequence_items", [](const py::type& of, bool item, bool assignment) {
    PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(of.ptr());
    if (item) type->tp_as_sequence->sq_item = nullptr;
    if (assignment) type->tp_as_sequence->sq_ass_item = nullptr;
    PyType_Modified(type);
  });
  m.def("count_bad", &stats::count_bad);
  m.def("call_counts", [] {
    py::dict d;
    for (const auto& [key, c] : stats::counts())
      d[py::make_tuple(key.first, key.second)] =
          py::make_tuple(c.calls, c.elements, c.bad_calls, c.violations, c.last_bad);
    return d;
  });
  m.def("reset_call_counts", &stats::reset);
  m.def("enter_sample", [](int64_t i) { ambient::samples().push_back(i); });
  m.def("leave_sample", [] { ambient::samples().pop_back(); });
#if defined(LOSSGUARD_WITH_CUDA)
  m.def("pending", [] { return pending::count.load(); });
  m.def("look", [] { pending::poll(Moment::check); }, py::call_guard<py::gil_scoped_release>());
  m.def("begin_backward", [](uintptr_t saved) { pending::begin_backward(reinterpret_cast<const void*>(saved)); },
        py::call_guard<py::gil_scoped_release>());
  m.def("install_threads", [](py::object thread_of_backward, py::object watch_backwards) {
    of_backward = thread_of_backward.release().ptr();
    watch = watch_backwards.release().ptr();
  });
  m.def("this_thread", [] {
    return py::capsule(new pending::ThreadPointer(pending::this_thread()), pending::kThreadName,
                       [](void* p) { delete static_cast<pending::ThreadPointer*>(p); });
  });
  m.def("any_at_step", &pending::any_at_step);
  m.def("wait_before_step",
        [](int64_t optimizer) { pending::wait(pending::Until::safe_to_step, Moment::step, optimizer); },
        py::call_guard<py::gil_scoped_release>());
  m.def("wait_for_own", [] { pending::wait(pending::Until::own, Moment::leave); },
        py::call_guard<py::gil_scoped_release>());
  m.def("wait_for_all", [](bool at_exit) { pending::wait(pending::Until::all, at_exit ? Moment::exit : Moment::check); },
        py::call_guard<py::gil_scoped_release>());
  m.def("limit_slots", &cuda::limit_slots);
#if defined(LOSSGUARD_EMULATED)
  m.def("emulate_on", [](int device, uintptr_t stream) {
    emulated_place = {device, reinterpret_cast<void*>(stream)};
  });
#endif
  m.def("runtime_calls", [] {
    py::dict d;
    cuda::for_runtime_calls(
        [](const char* name, int64_t calls, void* to) { (*static_cast<py::dict*>(to))[name] = calls; }, &d);
    return d;
  });
  m.def("cuda_status", [] {
    const cuda::DriverStatus status = cuda::driver_status();
    py::dict d;
    d["driver"] = status.driver;
    d["runtime"] = status.runtime;
    d["error"] = status.error ? py::object(py::str(status.error)) : py::object(py::none());
    return d;
  });
#endif
}
