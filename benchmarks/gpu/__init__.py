"""Tools for GPUs: what kernels compile to, without one (`make compile-report`), and everything on one (`on_gpu`)."""
