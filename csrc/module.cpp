// pybind11: how violations reach Python, the policy in force, and facts about the build.
#include <pybind11/pybind11.h>

#include "cpu/kernels.h"
#include "policy.h"
#include "raise.h"
#if defined(LOSSGUARD_WITH_CUDA)
#include "cuda/runtime.h"
#endif

namespace py = pybind11;

namespace lossguard {
namespace {

// Set once at import and never released: they are used until the process ends.
PyObject* handler = nullptr;
PyObject* unsupported = nullptr;

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

py::tuple describe(const View& v) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16", "int64", "uint8"};
  py::tuple shape(v.ndim);
  for (int d = 0; d < v.ndim; ++d) shape[d] = v.sizes[d];
  return py::make_tuple(shape, names[int(v.dtype)]);
}

}  // namespace

void deliver(const Violations& violations, const Call& call) {
  py::gil_scoped_acquire gil;
  py::list sections;
  for (int i = 0; i < violations.count; ++i) sections.append(describe(violations.sections[i]));
  py::dict d;
  d["loss"] = call.loss;
  d["site"] = call.site;
  d["on_violation"] = int(call.flags.policy.on_violation);
  d["sections"] = sections;
  d["input"] = describe(call.input);
  d["target"] = describe(call.target);
  d["device"] = py::make_tuple(call.device_type, call.device_index);
  if (call.num_classes >= 0) d["num_classes"] = call.num_classes;
  d["ignore_index"] = call.ignore_index;
  const py::object exception = py::reinterpret_borrow<py::object>(handler)(d);
  if (exception.is_none()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

void throw_unsupported(const std::string& why) {
  py::gil_scoped_acquire gil;
  PyErr_SetString(unsupported, why.c_str());
  throw py::error_already_set();
}

}  // namespace lossguard

PYBIND11_MODULE(_C, m) {
  using namespace lossguard;
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
#if defined(LOSSGUARD_WITH_CUDA)
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
