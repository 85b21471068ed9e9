"""Macros that the kernel bodies are written in: one header for CUDA, one for Metal.

A third one, for C++, is beside the tests: it runs the bodies where no GPU is. Each defines

- GROUP_X, GROUP_Y, GROUP_Z, GROUPS_Z, THREAD, THREADS: where the block is, how many there are in z, and the
  thread within its block;
- LANE_XOR(x, mask): a float of the lane whose number differs by `mask`, within 32 lanes that all take part;
- SHARED, BARRIER(): memory of a block, and a point that its threads pass together;
- DEVICE: the address space of the arrays;
- EXP2(x), AS_FLOAT(bits): two to the power of x; a float of an int's bits;
- UNROLL: in front of a loop whose arrays must stay in registers.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """What the bodies need to be known of a language and its devices."""

    header: str
    body_start: str = ""
    usual_core_count: int = 132
    """MLX does not report a device's own. It only decides how far keys are split."""


CUDA = Language(
    header="""
#define GROUP_X ((int)blockIdx.x)
#define GROUP_Y ((int)blockIdx.y)
#define GROUP_Z ((int)blockIdx.z)
#define GROUPS_Z ((int)gridDim.z)
#define THREAD ((int)threadIdx.x)
#define THREADS ((int)blockDim.x)
#define LANE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, (x), (mask))
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define DEVICE
#define EXP2(x) exp2_of_device(x)
#define AS_FLOAT(bits) __int_as_float(bits)
#define UNROLL _Pragma("unroll")
// To 2 in 2^23; exp2f() takes five instructions more to keep numbers that are next to nothing.
__device__ inline float exp2_of_device(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
"""
)

METAL = Language(
    header="""
#define GROUP_X ((int)threadgroup_position_in_grid.x)
#define GROUP_Y ((int)threadgroup_position_in_grid.y)
#define GROUP_Z ((int)threadgroup_position_in_grid.z)
#define GROUPS_Z ((int)threadgroups_per_grid.z)
#define THREAD ((int)thread_position_in_threadgroup.x)
#define THREADS ((int)threads_per_threadgroup.x)
#define LANE_XOR(x, mask) metal::simd_shuffle_xor((x), (ushort)(mask))
#define SHARED threadgroup
#define BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define DEVICE device
#define EXP2(x) metal::fast::exp2(x)
#define AS_FLOAT(bits) as_type<float>(bits)
#define UNROLL _Pragma("clang loop unroll(full)")
""",
    # MLX passes a kernel those attributes that its body names.
    body_start="// threadgroup_position_in_grid threadgroups_per_grid thread_position_in_threadgroup"
    " threads_per_threadgroup\n",
    usual_core_count=32,
)
