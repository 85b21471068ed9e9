"""Emulation of MLX's custom kernels: runs their bodies as C++, on any machine with a C++20 compiler.

`make_kernel` has the signature of `mx.fast.cuda_kernel`. Each thread of a block is a coroutine: it stops
where lanes exchange a number and at barriers, and the emulation sees to it that all lanes of a warp stop at
the same one. Blocks run one after the other, the last one first: a token that counted on what the blocks of
those before it write would not find it. Outputs begin as NaN, and inputs are given as they lie in
memory, so that a kernel may write to one in place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

COMPILER = shutil.which("g++") or shutil.which("clang++")
_COMPILE_S = 120

HEADER = r"""
#include <bit>
#include <cmath>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    const uint32_t all = std::bit_cast<uint32_t>(x);
    bits = x != x ? 0x7fc0 : (uint16_t)((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>((uint32_t)bits << 16); }
};

enum class State { running, exchanging, waiting, ended };
struct Block { int x, y, z, groups_z, threads; std::vector<float> slots[2]; };
struct Thread { Block* block; int index; int turn = 0; State state = State::running; };

struct Lane {
  struct promise_type {
    Lane get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
  std::coroutine_handle<promise_type> handle;
};
struct Exchange {
  Thread& self; float number; int mask;
  bool await_ready() { return false; }
  void await_suspend(std::coroutine_handle<>) {
    self.block->slots[self.turn][self.index] = number;
    self.state = State::exchanging;
  }
  // Two sets of slots in turn: a lane that goes on first must not write over what another has yet to read.
  float await_resume() {
    const int turn = self.turn;
    self.turn = 1 - turn;
    return self.block->slots[turn][self.index ^ mask];
  }
};
struct Barrier {
  Thread& self;
  bool await_ready() { return false; }
  void await_suspend(std::coroutine_handle<>) { self.state = State::waiting; }
  void await_resume() {}
};

// Returns whether the lanes of each warp, and at barriers all of them, went the same way.
template <class F> bool run_block(Block& block, F start) {
  std::vector<Thread> threads;
  for (int i = 0; i < block.threads; i++) threads.push_back({&block, i});
  for (auto& slots : block.slots) slots.assign((block.threads + 31) / 32 * 32, 0.0f);
  std::vector<Lane> lanes;
  for (auto& thread : threads) lanes.push_back(start(thread));
  bool same = true;
  for (bool ended = false; same && !ended;) {
    for (int first = 0; same && first < block.threads; first += 32) {
      const int last = first + 32 < block.threads ? first + 32 : block.threads;
      do {
        for (int i = first; i < last; i++) {
          threads[i].state = State::running;
          lanes[i].handle.resume();
          if (lanes[i].handle.done()) threads[i].state = State::ended;
        }
        for (int i = first; i < last; i++) same = same && threads[i].state == threads[first].state;
      } while (same && threads[first].state == State::exchanging);
    }
    for (auto& thread : threads) same = same && thread.state == threads[0].state;
    ended = threads[0].state == State::ended;
  }
  for (auto& lane : lanes) lane.handle.destroy();
  return same;
}
template <class F> bool launch(int gx, int gy, int gz, int threads, F start) {
  for (int x = gx; x-- > 0;) for (int y = gy; y-- > 0;) for (int z = gz; z-- > 0;) {
    Block block{x, y, z, gz, threads, {}};
    if (!run_block(block, start)) return false;
  }
  return true;
}
#define GROUP_X (self.block->x)
#define GROUP_Y (self.block->y)
#define GROUP_Z (self.block->z)
#define GROUPS_Z (self.block->groups_z)
#define THREAD (self.index)
#define THREADS (self.block->threads)
#define LANE_XOR(x, mask) (co_await Exchange{self, (x), (mask)})
#define SHARED static
#define BARRIER() co_await Barrier{self}
#define DEVICE
#define EXP2(x) std::exp2(x)
#define AS_FLOAT(bits) std::bit_cast<float>(bits)
#define UNROLL
#define alignas(bytes)  // MLX aligns to 8 bytes on CPUs
"""

_TYPES = {mx.int32: "int32_t", mx.float32: "float", mx.bfloat16: "bfloat16"}


class Emulation:
    """Kernels compiled into a folder, each once, by whichever process needs it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self.launches: list[str] = []
        """Names of the kernels that ran."""

    @property
    def compiled_count(self) -> int:
        return len(self._libraries)

    def make_kernel(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
    ) -> Callable[..., list[mx.array]]:
        """Return a kernel as `mx.fast.cuda_kernel` does; it runs when it is called."""

        def launch(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            assert threadgroup[1:] == (1, 1) and grid[0] % threadgroup[0] == 0
            lines, arguments = [], []
            for input_name, array in zip(input_names, inputs, strict=True):
                lines.append(f"const {_TYPES[array.dtype]}* {input_name}")
                arguments.append(_memory(array))
            outputs = [
                _garbage(shape, _host_type(d)) for shape, d in zip(output_shapes, output_dtypes, strict=True)
            ]
            for output_name, dtype in zip(output_names, output_dtypes, strict=True):
                lines.append(f"{_TYPES[dtype]}* {output_name}")
            arguments.extend(outputs)
            library = self._library(header, lines, template, source)
            self.launches.append(name)
            pointers = (ctypes.c_void_p * len(arguments))(*[each.ctypes.data for each in arguments])
            groups = (grid[0] // threadgroup[0], *grid[1:])
            assert library.run(*groups, threadgroup[0], pointers), (
                f"lanes of a warp of {name} went different ways"
            )
            return [mx.array(each).view(dtype) for each, dtype in zip(outputs, output_dtypes, strict=True)]

        return launch

    def _library(
        self, header: str, lines: Sequence[str], template: Sequence[tuple[str, Any]], source: str
    ) -> ctypes.CDLL:
        constants = "".join(
            f"using {name} = {_TYPES[value]};\n"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {value};\n"
            for name, value in template
        )
        types = [line.rsplit(" ", 1)[0] for line in lines]
        casts = ", ".join(f"({each})arguments[{i}]" for i, each in enumerate(types))
        text = (
            f'#include "{self._precompiled(header).name}"\n{constants}\n'
            f"static Lane body(Thread& self, {', '.join(lines)}) {{\n{source}\nco_return;\n}}\n"
            'extern "C" int run(int x, int y, int z, int threads, void** arguments) {\n'
            f"  return launch(x, y, z, threads, [&](Thread& self) {{ return body(self, {casts}); }});\n}}\n"
        )
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest not in self._libraries:
            library_path = self._folder / f"{digest}.so"
            if not library_path.exists():
                source_path = self._folder / f"{digest}.{os.getpid()}.cpp"
                source_path.write_text(text)
                _compile(library_path, "-shared", str(source_path))
                source_path.unlink()
            self._libraries[digest] = ctypes.CDLL(str(library_path))
        return self._libraries[digest]

    def _precompiled(self, header: str) -> Path:
        """Return the header's file, with a form beside it that compilers read faster."""
        path = self._folder / f"{hashlib.sha256(header.encode()).hexdigest()[:16]}.hpp"
        made = path.with_name(f"{path.name}.gch")
        if not made.exists():
            path.write_text(header)
            _compile(made, "-x", "c++-header", str(path))
        return path


def _compile(target: Path, *options: str) -> None:
    """Others may be at the same: whoever is last replaces what is whole by its like."""
    assert COMPILER is not None
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", *options, "-o", str(unfinished)]
    subprocess.run(command, check=True, timeout=_COMPILE_S)
    unfinished.rename(target)


def _memory(array: mx.array) -> np.ndarray[Any, Any]:
    """Return the array's own bytes."""
    mx.eval(array)
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits, copy=False)


def _garbage(shape: Sequence[int], dtype: type[Any]) -> np.ndarray[Any, Any]:
    """Return numbers that are NaN, or -1 where they are ints."""
    numbers = np.empty(shape, dtype)
    numbers.view(np.uint8).fill(0xFF)
    return numbers


def _host_type(dtype: mx.Dtype) -> type[Any]:
    return {mx.int32: np.int32, mx.float32: np.float32, mx.bfloat16: np.uint16}[dtype]
