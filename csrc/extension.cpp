// The module fastbert._C. Loading it registers the kernels with torch. Its functions describe the build, and check
// whether modules have changed, which every forward asks (fastbert/parts.py).
#include <Python.h>
#include <torch/headeronly/version.h>

#include "cpu/isa.h"
#include "packed_linear.h"

namespace {

PyObject* words(const char* text) {
  PyObject* const string = PyUnicode_FromString(text);
  PyObject* const list = string ? PyUnicode_Split(string, nullptr, -1) : nullptr;
  PyObject* const tuple = list ? PyList_AsTuple(list) : nullptr;
  Py_XDECREF(list), Py_XDECREF(string);
  return tuple;
}

// The layout of packed weights on this processor: the channels of a panel, and the numbers of a group for float32,
// bfloat16 and int8. None if the processor has no kernels.
PyObject* packed_layout() {
  if (!FB_BEST_ISA(packed_width)) Py_RETURN_NONE;
  using fastbert::Weights;
  const auto group = [](Weights weights) { return static_cast<long long>(FB_BEST_ISA(packed_group)(weights)); };
  return Py_BuildValue("(L{s:L, s:L, s:L})", static_cast<long long>(FB_BEST_ISA(packed_width)()), "float32",
                       group(Weights::f32), "bfloat16", group(Weights::bf16), "int8", group(Weights::s8));
}

PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s, s:s, s:N, s:s, s:N, s:s, s:N}", "torch_version", TORCH_VERSION, "compiler", FB_COMPILER,
                       "cpu_sets", words(FB_CPU_ISAS), "cpu_set", fastbert::cpu::name_of(fastbert::cpu::best_isa()),
                       "packed_layout", packed_layout(), "cuda_version", *FB_CUDA_VERSION ? FB_CUDA_VERSION : nullptr,
                       "cuda_architectures", words(FB_CUDA_ARCHITECTURES));
}

// fastbert.parts.as_before, whose arguments have to be seven tuples.
PyObject* as_before(PyObject*, PyObject* args) {
  PyObject *tables, *sizes, *typed, *types, *owners, *names, *values, *const tuple = (PyObject*)&PyTuple_Type;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!", tuple, &tables, tuple, &sizes, tuple, &typed, tuple, &types, tuple,
                        &owners, tuple, &names, tuple, &values))
    return nullptr;
  const auto count = [](PyObject* of) { return PyTuple_Size(of); };
  if (count(tables) != count(sizes) || count(typed) != count(types) || count(owners) != count(names) ||
      count(owners) != count(values)) {
    PyErr_SetString(PyExc_ValueError, "as_before: tuples of different lengths");
    return nullptr;
  }
  const auto at = [](PyObject* of, Py_ssize_t i) { return PyTuple_GetItem(of, i); };
  for (Py_ssize_t i = 0; i < count(tables); ++i) {
    const Py_ssize_t size = PyDict_Size(at(tables, i)), before = PyLong_AsSsize_t(at(sizes, i));
    if (size < 0 || before < 0) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    if (size != before) return Py_NewRef(Py_False);
  }
  for (Py_ssize_t i = 0; i < count(typed); ++i)
    if ((PyObject*)Py_TYPE(at(typed, i)) != at(types, i)) return Py_NewRef(Py_False);
  for (Py_ssize_t i = 0; i < count(owners); ++i) {
    PyObject* const value = PyDict_GetItemWithError(at(owners, i), at(names, i));
    if (value == at(values, i)) continue;
    if (PyErr_Occurred()) return nullptr;
    if (value || at(values, i) != Py_None) return Py_NewRef(Py_False);
  }
  return Py_NewRef(Py_True);
}

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  static PyMethodDef functions[] = {
      {"build_info", build_info, METH_NOARGS,
       "What this library was built with, and cpu_set: the instruction set that its CPU loops use on this processor, "
       "or None if it has none of cpu_sets."},
      {"as_before", as_before, METH_VARARGS, "fastbert.parts.as_before, of tuples."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
