#include "callsite.h"

#include <Python.h>
#include <frameobject.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace lossguard::callsite {
namespace {

// All of it is used under the GIL. Code objects are kept: their addresses name them.
struct Site {
  PyCodeObject* code;
  int instruction;  // byte offset

  bool operator==(const Site&) const = default;
};
struct Hash {
  size_t operator()(const Site& s) const {
    return (reinterpret_cast<size_t>(s.code) + size_t(s.instruction)) * size_t(0x9e3779b97f4a7c15);
  }
};
struct Sites {
  std::unordered_map<PyCodeObject*, bool> internal;
  std::unordered_map<Site, int64_t, Hash> numbers;
  std::vector<Site> sites;
};
Sites& sites = *new Sites;
PyObject* is_internal_file = nullptr;

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * int(sizeof(_Py_CODEUNIT));
#endif
}

bool is_internal(PyCodeObject* code) {
  const auto known = sites.internal.find(code);
  if (known != sites.internal.end()) return known->second;
  PyObject* answer = PyObject_CallOneArg(is_internal_file, code->co_filename);
  const bool internal = answer && PyObject_IsTrue(answer) == 1;
  Py_XDECREF(answer);
  PyErr_Clear();
  if (sites.internal.emplace(code, internal).second) Py_INCREF(code);
  return internal;
}

int64_t number_of(PyCodeObject* code, int instruction) {
  const Site site{code, instruction};
  const auto [at, added] = sites.numbers.emplace(site, int64_t(sites.sites.size()) + 1);
  if (added) sites.sites.push_back(site);
  return at->second;
}

PyObject* call_site(PyObject*, PyObject*) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  int64_t number = 0;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const bool ours = !is_internal(code);
    if (ours) number = number_of(code, instruction_of(frame));
    Py_DECREF(code);
    PyFrameObject* back = ours ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return PyLong_FromLongLong(number);
}
PyMethodDef call_site_method = {"call_site", call_site, METH_NOARGS, nullptr};

}  // namespace

void add_to(py::module_& m) {
  // Not through pybind11, which would cost more than all the rest.
  m.attr("call_site") = py::reinterpret_steal<py::object>(PyCFunction_New(&call_site_method, nullptr));
  m.def("set_internal", [](py::object f) { is_internal_file = f.release().ptr(); });
  m.def("describe_site", [](int64_t number) {
    if (number < 1 || number > int64_t(sites.sites.size())) throw py::index_error("no such call site");
    const Site site = sites.sites[number - 1];
    py::object code = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(site.code));
    return py::make_tuple(code.attr("co_filename"), PyCode_Addr2Line(site.code, site.instruction), code.attr("co_name"));
  });
}

}  // namespace lossguard::callsite
