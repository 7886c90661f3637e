"""benchmarks/gpu/cuda_report.py and docs/cuda_report.md: what the CUDA kernels compile to. Needs no GPU."""

import subprocess
import sys

import pytest

from benchmarks.gpu import cuda_report as report

needs_nvcc = pytest.mark.skipif(report.nvcc() is None, reason="there is no nvcc (CUDA_HOME, PATH)")


def test_names_keep_their_template_arguments():
    long = (
        "void fastbert::cuda::(anonymous namespace)::f_kernel<__half, fastbert::cuda::Vec<__nv_bfloat16, 8>, (int)4>"
        "(__half const*, int)"
    )
    assert report.short(long) == "f_kernel<half, Vec<bf16, 8>, (int)4>"
    assert report.short("fastbert::cuda::(anonymous namespace)::f_kernel(float const*, int)") == "f_kernel"


SOURCE = """
extern __shared__ float shared[];
template <int N>
__global__ void __launch_bounds__(1024) spills(float* x) {  // N > 64 values a thread, of which 64 fit
  float v[N];
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) x[threadIdx.x * N + i] = v[i] * v[N - 1 - i] + v[(i * 7) % N];
}
__global__ void copies(float4* x) {
  shared[threadIdx.x] = x[threadIdx.x].x;
  __syncthreads();
  const float f = shared[threadIdx.x ^ 1];
  x[threadIdx.x] = make_float4(f, f, f, f);
}
template __global__ void spills<200>(float*);
"""


@needs_nvcc
def test_a_kernel_that_spills_is_a_problem(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE)
    copies, spills = report.compile(source, 90)
    assert (copies.kernel, copies.variant, copies.launch) == ("planted.cu copies", "", "? threads, shared memory")
    assert (copies.shared, copies.instructions["STG.128"], copies.instructions["LDL+STL"]) == (0, 1, 0)
    assert copies.problem == ""
    assert (spills.kernel, spills.variant) == ("planted.cu spills", "<200>")
    assert (spills.launch, spills.registers, spills.shared) == ("1024 threads", 64, 0)
    assert spills.instructions["LDL+STL"] > 100
    assert spills.spilled > 400 and spills.problem == f"spills {spills.spilled} bytes"


@needs_nvcc
@pytest.mark.slow
def test_the_committed_report_is_what_the_kernels_compile_to():
    command = [sys.executable, "-m", "benchmarks.gpu.cuda_report", "--check", "--arch", "90"]
    result = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
