// The module fastbert._C. Loading it registers the kernels with torch; its only function describes the build.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include "cpu/blas.h"
#include "cpu/isa.h"

namespace py = pybind11;

namespace {

py::object active_isa() {
  switch (fastbert::cpu::best_isa()) {
    case fastbert::cpu::Isa::generic: return py::str("generic");
    case fastbert::cpu::Isa::avx2: return py::str("avx2");
    case fastbert::cpu::Isa::avx512: return py::str("avx512");
    case fastbert::cpu::Isa::avx512_bf16: return py::str("avx512_bf16");
    case fastbert::cpu::Isa::none: break;
  }
  return py::none();
}

py::dict build_info() {
  py::dict info;
  info["torch_version"] = TORCH_VERSION;
  info["compiler"] = FB_COMPILER;
  info["cpu_sets"] = py::tuple(py::str(FB_CPU_ISAS).attr("split")());
  info["cpu_set"] = active_isa();
  info["blas"] = fastbert::has_blas();
#ifdef FB_CUDA
  info["cuda_version"] = FB_CUDA_VERSION;
  info["cuda_architectures"] = py::tuple(py::str(FB_CUDA_ARCHITECTURES).attr("split")());
#else
  info["cuda_version"] = py::none();
  info["cuda_architectures"] = py::tuple();
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def(
      "build_info", &build_info,
      "What this library was built with, and cpu_set: the instruction set that its CPU loops use on this processor, or "
      "None if it has none of cpu_sets.");
}
