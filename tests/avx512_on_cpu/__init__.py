"""The loops for AVX-512 and AMX on any x86 processor: avx512.h computes the intrinsics, tests/amx_on_cpu the tiles."""
