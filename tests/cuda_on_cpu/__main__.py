"""`PYTHONPATH=tests python -m cuda_on_cpu` compiles the library before tests need it, or says why it cannot."""

import torch

from cuda_on_cpu import build, folder

print("not needed: there is a GPU" if torch.cuda.is_available() else build(folder()) or f"compiled in {folder()}")
