"""Tools for GPUs: reports of compiled kernels, which need none (`make compile-report`), and runs on one (`on_gpu`)."""
