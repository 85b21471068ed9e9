"""Compiling kernels with NVRTC: what `mx.fast.cuda_kernel` does, ten times faster.

MLX puts its own headers in front of each kernel, which take 2.5 s to compile (on a machine with an H100), and
stores nothing for the next process. The bodies here need none of them. The library is the one that MLX has
loaded; `mx.fast.precompiled_cuda_kernel` runs the cubin. Inference thread only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_TYPES = {mx.int32: "int", mx.float32: "float", mx.float16: "Float16", mx.bfloat16: "Bfloat16"}

_HEADER = """
struct Float16 {
  unsigned short bits;
  Float16() = default;
  __device__ explicit Float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct Bfloat16 {
  unsigned short bits;
  Bfloat16() = default;
  __device__ explicit Bfloat16(float x) {
    const unsigned all = __float_as_uint(x);
    bits = x != x ? 0x7fff : (unsigned short)((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
  }
  __device__ explicit operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
"""

Template = Sequence[tuple[str, int | mx.Dtype]]


class NvrtcError(RuntimeError):
    """NVRTC is missing, or did not compile a kernel; the message contains its log."""


def make_kernel(
    *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Callable[..., list[mx.array]]:
    """Return a kernel as `mx.fast.cuda_kernel` does; it is compiled when it first runs.

    Raises:
        NvrtcError: From the kernel, if it cannot be compiled.
    """
    compiled: dict[tuple[Any, ...], bytes] = {}

    def launch(
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        dtypes = (*(each.dtype for each in inputs), *output_dtypes)
        key = (*template, *dtypes)
        cubin = compiled.get(key)
        if cubin is None:
            parameters = [
                f"{'const ' if index < len(inputs) else ''}{_TYPES[dtype]}* {parameter}"
                for index, (dtype, parameter) in enumerate(
                    zip(dtypes, (*input_names, *output_names), strict=True)
                )
            ]
            text = header + _HEADER + _function(name, parameters, template, source)
            cubin = compiled[key] = compile_cubin(text)
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=cubin,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[],
            grid=grid,
            threadgroup=threadgroup,
            ensure_row_contiguous=True,
        )

    return launch


def _function(name: str, parameters: Sequence[str], template: Template, source: str) -> str:
    constants = "".join(
        f"using {constant} = {_TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr int {constant} = {value};\n"
        for constant, value in template
    )
    return f'{constants}extern "C" __global__ void {name}({", ".join(parameters)}) {{\n{source}\n}}\n'


def compile_cubin(source: str, *, architecture: str | None = None) -> bytes:
    """Compile one kernel for this device, or for an architecture such as sm_90.

    Raises:
        NvrtcError: With NVRTC's log.
    """
    nvrtc = _library()
    architecture = architecture or str(mx.device_info()["architecture"])
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"icehouse.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise NvrtcError(f"NVRTC did not compile a kernel: {log.decode(errors='replace').rstrip(chr(0))}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def is_available() -> bool:
    """Return whether NVRTC is available, and MLX can run its cubins."""
    try:
        _library()
    except NvrtcError:
        return False
    return hasattr(mx.fast, "precompiled_cuda_kernel")


@functools.cache
def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvrtcError(f"none of {', '.join(_LIBRARIES)} can be loaded")


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(read(program, content))
    return content.raw


def _check(code: int) -> None:
    if code:
        raise NvrtcError(f"NVRTC failed with code {code}")
