"""Benchmarks as on a processor with nothing newer than AVX2."""

import functools
import os
import shutil
import subprocess

import pytest

from benchmarks.avx2 import __main__ as avx2
from fastbert import backends

ASKS = """
#include <cpuid.h>
#include <stdio.h>
int main() {
  unsigned eax, ebx, ecx, edx;
  __cpuid_count(7, 0, eax, ebx, ecx, edx);
  printf("%u %u\\n", ebx >> 5 & 1, ebx >> 16 & 1);
}
"""


@pytest.mark.skipif("avx512f" not in backends.cpuinfo("flags"), reason="needs a processor with AVX-512")
@pytest.mark.skipif(not all(map(shutil.which, ("cc", "objdump", "readelf"))), reason="needs cc, objdump and readelf")
def test_other_peoples_code_sees_a_processor_without_avx512(tmp_path, monkeypatch):
    program, source = tmp_path / "asks", tmp_path / "asks.c"
    source.write_text(ASKS)
    subprocess.run(["cc", "-o", program, source], check=True)
    ask = functools.partial(subprocess.check_output, [program], text=True)
    assert ask() == "1 1\n"
    monkeypatch.setattr(avx2, "BUILD", tmp_path)
    monkeypatch.setattr(avx2, "LIBRARY", tmp_path / "cpuid.so")
    monkeypatch.setattr(avx2, "ENGINES", ())
    assert avx2.mask(program) > 0 and avx2.mask(program) == 0
    assert ask(env=avx2.environment()) == "1 0\n"  # it has AVX2, and no AVX-512F


def test_a_library_that_cannot_be_read_to_its_end_is_not_used(tmp_path, monkeypatch):
    tool = tmp_path / "objdump"
    tool.write_text("#!/bin/sh\necho '  12: cpuid'\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(subprocess.CalledProcessError):
        avx2.addresses(tmp_path / "library.so")
