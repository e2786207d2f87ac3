"""python -m workers.kernels.cpu: compiles the kernels for this processor, ahead of the first start."""

from kvtransfer.native import cache_folder
from workers.kernels.cpu.native_build import PATIENT_TIMEOUT_S, compile_library

print(compile_library(cache_folder(), timeout_s=PATIENT_TIMEOUT_S))
