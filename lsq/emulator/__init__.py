"""An emulated GPU, made of g++ and fibers: builds kernels for the CPU and checks what they do."""

from lsq.emulator.build import build_driver, build_products, compile_kernels

__all__ = ["build_driver", "build_products", "compile_kernels"]
