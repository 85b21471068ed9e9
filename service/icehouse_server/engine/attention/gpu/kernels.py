"""Kernels of attention over pages: one body text for all languages, with a header for each language.

The headers for CUDA and Metal are here. One for C++ is beside the tests and runs the bodies without a GPU.
Each header defines

- GROUP_X, GROUP_Y, GROUP_Z, GROUPS_Z, THREAD, THREADS: the block's indices, the number of blocks in z, the
  thread's index within its block, and the number of threads in a block;
- LANE_XOR(x, mask): a float of the lane whose number differs by `mask`, within 32 lanes that all take part;
- SHARED, BARRIER(): memory of a block, and a point that its threads pass together;
- DEVICE: the address space of the arrays;
- EXP2(x), AS_FLOAT(bits): two to the power of x; a float of an int's bits;
- UNROLL: goes before a loop whose arrays must stay in registers.

Constants of a model: T, the pool's type; Q, the type of queries and of the result; D, head size; KV_HEADS;
GROUP, query heads per KV head; PAGE, tokens per page; HEADS, query heads per block; LANES, lanes per key;
VECTOR, numbers that a lane loads at once; ROUNDS, keys that it loads before using one. All else is passed
when a kernel runs, so that nothing is compiled again:

- `pool`: [pages, layers, 2, KV_HEADS, PAGE, D], written in place. The array passed may be a short view of its
  beginning (see `launch`); offsets within are 64-bit;
- `places`: for each token three ints: where its row's page numbers begin in this array, its position, and
  that of its row's first token in this pass; then the page numbers;
- `settings`: six ints: the pool's layers, the layer, the window (0: none), keys per split (for merging: the
  number of splits), the scale's bits, and whether a kernel that attends also writes;
- `order`: what this launch must come after; a launch that writes gives a new one.

Attention is FlashDecoding (Dao et al., 2023): the keys are split, each split has its own softmax, and the
splits are merged by their maxima and sums. Logits are in powers of two, which saves a product each.
"""

from __future__ import annotations

import dataclasses

THREADS = 128
"""Threads of a block that writes or attends: the bodies below assume four warps of 32."""

PAGE_THREADS = 256
PAGE_VECTORS = 8
"""For a block that moves or gathers pages: its threads, and how many 16-byte vectors each thread moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """What the bodies need from a language and its devices."""

    header: str
    body_start: str = ""
    usual_core_count: int = 132
    """MLX does not report a device's own count. It only decides how far keys are split."""


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
    # MLX passes a kernel the attributes that its body names.
    body_start="// threadgroup_position_in_grid threadgroups_per_grid thread_position_in_threadgroup"
    " threads_per_threadgroup\n",
    usual_core_count=32,
)

WRITE = r"""
  // A block a token: its keys and values of all heads.
  constexpr int N = 16 / sizeof(T), HEAD_VECTORS = D / N;
  struct alignas(16) Vector { T numbers[N]; };
  const int token = GROUP_X, layer_count = settings[0], layer = settings[1];
  const int start = places[3 * token], position = places[3 * token + 1];
  const size_t page = (size_t)places[start + position / PAGE];
  const size_t slot = (page * layer_count + layer) * 2 * KV_HEADS * PAGE + position % PAGE;
  DEVICE Vector* to = (DEVICE Vector*)pool + slot * HEAD_VECTORS;
  const DEVICE Vector* new_keys = (const DEVICE Vector*)keys + (size_t)token * KV_HEADS * HEAD_VECTORS;
  const DEVICE Vector* new_values = (const DEVICE Vector*)values + (size_t)token * KV_HEADS * HEAD_VECTORS;
  for (int i = THREAD; i < KV_HEADS * HEAD_VECTORS; i += THREADS) {
    const int at = i / HEAD_VECTORS * PAGE * HEAD_VECTORS + i % HEAD_VECTORS;
    to[at] = new_keys[i];
    to[at + KV_HEADS * PAGE * HEAD_VECTORS] = new_values[i];
  }
  if (token == 0 && THREAD == 0) new_order[0] = 0;
"""

MOVE_PAGES = r"""
  // Whole pages from `content` to the pool: `moves` has two ints for each, its number there and here.
  constexpr int N = 16 / sizeof(T);
  const int vector_count = settings[0] * 2 * KV_HEADS * PAGE * (D / N);
  struct alignas(16) Vector { T numbers[N]; };
  const DEVICE Vector* from = (const DEVICE Vector*)content + (size_t)moves[2 * GROUP_Y] * vector_count;
  DEVICE Vector* to = (DEVICE Vector*)pool + (size_t)moves[2 * GROUP_Y + 1] * vector_count;
  for (int j = 0; j < PAGE_VECTORS; j++) {
    const int i = (GROUP_X * PAGE_VECTORS + j) * THREADS + THREAD;
    if (i < vector_count) to[i] = from[i];
  }
  if (GROUP_X == 0 && GROUP_Y == 0 && THREAD == 0) new_order[0] = 0;
""".replace("PAGE_VECTORS", str(PAGE_VECTORS))

GATHER_ROW = r"""
  // A block a page's worth of tokens, head, and keys or values. `span`: where the row's page numbers begin in
  // `places`, its last token, the first one wanted, and how many.
  constexpr int N = 16 / sizeof(T), HEAD_VECTORS = D / N;
  struct alignas(16) Vector { T numbers[N]; };
  const int head = GROUP_Y, layer_count = settings[0], layer = settings[1];
  const int start = span[0], last = span[1], first = span[2], count = span[3];
  const int before = GROUP_X * PAGE, end = count - before < PAGE ? count : before + PAGE;
  DEVICE Vector* to = (DEVICE Vector*)(GROUP_Z == 0 ? keys : values) + (size_t)head * count * HEAD_VECTORS;
  for (int i = before * HEAD_VECTORS + THREAD; i < end * HEAD_VECTORS; i += THREADS) {
    const int wanted = first + i / HEAD_VECTORS, token = wanted < last ? wanted : last;
    const size_t page = (size_t)places[start + token / PAGE];
    const size_t run = ((page * layer_count + layer) * 2 + GROUP_Z) * KV_HEADS + head;
    to[i] = ((const DEVICE Vector*)pool)[(run * PAGE + token % PAGE) * HEAD_VECTORS + i % HEAD_VECTORS];
  }
"""

_ATTEND = r"""
  // A block a token, HEADS query heads of one KV head, and a split. Of its 4 warps each takes PARTS keys at
  // once, LANES lanes a key, and loads ROUNDS of them before it uses one.
  // Where it writes too, `keys` and `values` are those of the pass's tokens. They are taken from there, since
  // nobody knows when another block has written its own.
  constexpr int PARTS = 32 / LANES, WARPS = 4, ROUND = WARPS * PARTS;
  constexpr int E = D / LANES, VECTORS = E / VECTOR, BLOCKS = (GROUP + HEADS - 1) / HEADS;
  constexpr float NONE = -1e30f;
  struct alignas(VECTOR * sizeof(T)) Vector { T numbers[VECTOR]; };
  const int token = GROUP_X, split = GROUP_Z, kv_head = GROUP_Y / BLOCKS;
  const int skipped = GROUP_Y % BLOCKS * HEADS, first_head = kv_head * GROUP + skipped;
  const int head_count = GROUP - skipped < HEADS ? GROUP - skipped : HEADS;
  const int warp = THREAD / 32, part = THREAD % 32 / LANES, lane = THREAD % LANES;
  const int layer_count = settings[0], layer = settings[1], window = settings[2], split_size = settings[3];
  const float scale = AS_FLOAT(settings[4]) * 1.44269504f;
  const int start = places[3 * token], position = places[3 * token + 1];
  const int first_new = settings[5] ? places[3 * token + 2] : position + 1;
  const int begin = (window > 0 && position >= window ? position + 1 - window : 0) + split * split_size;
  const int end = position + 1 - begin > split_size ? begin + split_size : position + 1;

  float q[HEADS][E], o[HEADS][E], top[HEADS], sum[HEADS];
  UNROLL for (int g = 0; g < HEADS; g++) {
    const int head = first_head + (g < head_count ? g : 0);
    const DEVICE Q* from = queries + ((size_t)token * KV_HEADS * GROUP + head) * D;
    top[g] = NONE;
    sum[g] = 0.0f;
    UNROLL for (int e = 0; e < E; e++) {
      q[g][e] = (float)from[(e / VECTOR * LANES + lane) * VECTOR + e % VECTOR] * scale;
      o[g][e] = 0.0f;
    }
  }
  // All warps go round alike, or CUDA must ask at each exchange who takes part.
  for (int round = begin; round < end; round += ROUND * ROUNDS) {
    const int first_key = round + warp * PARTS + part;
    Vector some_keys[ROUNDS][VECTORS], some_values[ROUNDS][VECTORS];
    UNROLL for (int r = 0; r < ROUNDS; r++) {
      const int wanted = first_key + r * ROUND, key = wanted < end ? wanted : begin;
      const size_t page = (size_t)places[start + key / PAGE];
      const size_t slot = ((page * layer_count + layer) * 2 * KV_HEADS + kv_head) * PAGE + key % PAGE;
      const size_t new_slot = (size_t)(token - position + key) * KV_HEADS + kv_head;
      const bool is_new = key >= first_new;
      const DEVICE T* from_keys = is_new ? keys + new_slot * D : pool + slot * D;
      const DEVICE T* from_values = is_new ? values + new_slot * D : pool + (slot + KV_HEADS * PAGE) * D;
      UNROLL for (int v = 0; v < VECTORS; v++) {
        some_keys[r][v] = ((const DEVICE Vector*)from_keys)[v * LANES + lane];
        some_values[r][v] = ((const DEVICE Vector*)from_values)[v * LANES + lane];
      }
    }
    float logits[ROUNDS][HEADS];
    UNROLL for (int r = 0; r < ROUNDS; r++) {
      UNROLL for (int g = 0; g < HEADS; g++) logits[r][g] = 0.0f;
      UNROLL for (int e = 0; e < E; e++) {
        const float number = (float)some_keys[r][e / VECTOR].numbers[e % VECTOR];
        UNROLL for (int g = 0; g < HEADS; g++) logits[r][g] += q[g][e] * number;
      }
      UNROLL for (int g = 0; g < HEADS; g++) {
        UNROLL for (int mask = LANES / 2; mask > 0; mask /= 2) {
          const float other = LANE_XOR(logits[r][g], mask);
          logits[r][g] += other;
        }
        if (first_key + r * ROUND >= end) logits[r][g] = NONE;
      }
    }
    UNROLL for (int g = 0; g < HEADS; g++) {
      float highest = top[g];
      UNROLL for (int r = 0; r < ROUNDS; r++) highest = logits[r][g] > highest ? logits[r][g] : highest;
      const float kept = EXP2(top[g] - highest);
      top[g] = highest;
      sum[g] *= kept;
      UNROLL for (int e = 0; e < E; e++) o[g][e] *= kept;
      UNROLL for (int r = 0; r < ROUNDS; r++) {
        logits[r][g] = first_key + r * ROUND < end ? EXP2(logits[r][g] - highest) : 0.0f;
        sum[g] += logits[r][g];
      }
    }
    UNROLL for (int r = 0; r < ROUNDS; r++) {
      UNROLL for (int e = 0; e < E; e++) {
        const float number = (float)some_values[r][e / VECTOR].numbers[e % VECTOR];
        UNROLL for (int g = 0; g < HEADS; g++) o[g][e] += logits[r][g] * number;
      }
    }
  }
  if (first_new <= position && begin <= position && end > position && skipped == 0) {
    constexpr int N = 16 / sizeof(T);
    struct alignas(16) Whole { T numbers[N]; };
    const size_t page = (size_t)places[start + position / PAGE];
    const size_t slot = ((page * layer_count + layer) * 2 * KV_HEADS + kv_head) * PAGE + position % PAGE;
    DEVICE Whole* to = (DEVICE Whole*)pool + slot * (D / N);
    for (int i = THREAD; i < D / N; i += THREADS) {
      const size_t at = ((size_t)token * KV_HEADS + kv_head) * (D / N) + i;
      to[i] = ((const DEVICE Whole*)keys)[at];
      to[i + KV_HEADS * PAGE * (D / N)] = ((const DEVICE Whole*)values)[at];
    }
  }
  if (token == 0 && GROUP_Y == 0 && split == 0 && THREAD == 0) new_order[0] = 0;
  // The keys that a warp took at once, then the warps.
  UNROLL for (int g = 0; g < HEADS; g++) {
    UNROLL for (int mask = LANES; mask < 32; mask *= 2) {
      const float other_top = LANE_XOR(top[g], mask);
      const float other_sum = LANE_XOR(sum[g], mask);
      const float highest = other_top > top[g] ? other_top : top[g];
      const float mine = EXP2(top[g] - highest), others = EXP2(other_top - highest);
      top[g] = highest;
      sum[g] = sum[g] * mine + other_sum * others;
      UNROLL for (int e = 0; e < E; e++) {
        const float other = LANE_XOR(o[g][e], mask);
        o[g][e] = o[g][e] * mine + other * others;
      }
    }
  }
  SHARED float warp_o[WARPS * HEADS * D];
  SHARED float warp_top[WARPS * HEADS];
  SHARED float warp_sum[WARPS * HEADS];
  if (part == 0) {
    UNROLL for (int g = 0; g < HEADS; g++) {
      const int at = warp * HEADS + g;
      UNROLL for (int e = 0; e < E; e++) {
        warp_o[at * D + (e / VECTOR * LANES + lane) * VECTOR + e % VECTOR] = o[g][e];
      }
      if (lane == 0) {
        warp_top[at] = top[g];
        warp_sum[at] = sum[g];
      }
    }
  }
  BARRIER();
  for (int i = THREAD; i < head_count * D; i += THREADS) {
    const int g = i / D, e = i % D, head = first_head + g;
    float highest = NONE, total = 0.0f, number = 0.0f;
    for (int w = 0; w < WARPS; w++) {
      highest = warp_top[w * HEADS + g] > highest ? warp_top[w * HEADS + g] : highest;
    }
    for (int w = 0; w < WARPS; w++) {
      const float share = EXP2(warp_top[w * HEADS + g] - highest);
      total += warp_sum[w * HEADS + g] * share;
      number += warp_o[(w * HEADS + g) * D + e] * share;
    }
"""

ATTEND_WHOLE = (
    _ATTEND
    + r"""
    TAKE_SINK
    out[((size_t)token * KV_HEADS * GROUP + head) * D + e] = (Q)(number / total);
  }
"""
)
"""Attends to each token's keys in one split and writes the result itself."""

ATTEND_SPLIT = (
    _ATTEND
    + r"""
    const size_t at = ((size_t)token * KV_HEADS * GROUP + head) * GROUPS_Z + split;
    if (begin < end) parts[at * D + e] = number;
    if (e == 0) {
      part_sums[at * 2] = highest;
      part_sums[at * 2 + 1] = total;
    }
  }
"""
)

MERGE = r"""
  // A block a token and query head, D threads.
  const int head = GROUP_X % HEADS, e = THREAD, part_count = settings[3];
  const size_t first = (size_t)GROUP_X * part_count;
  float highest = -1e30f, total = 0.0f, number = 0.0f;
  for (int p = 0; p < part_count; p++) {
    const float top = part_sums[(first + p) * 2];
    highest = top > highest ? top : highest;
  }
  for (int p = 0; p < part_count; p++) {
    const float share = EXP2(part_sums[(first + p) * 2] - highest);
    total += part_sums[(first + p) * 2 + 1] * share;
    if (share > 0.0f) number += parts[(first + p) * D + e] * share;   // an empty split wrote no numbers
  }
  TAKE_SINK
  out[(size_t)GROUP_X * D + e] = (Q)(number / total);
"""
"""Merges the results of the splits."""

_TAKE_SINK = r"""
    const float sink = (float)sinks[head] * 1.44269504f;
    const float raised = sink > highest ? sink : highest, share = EXP2(highest - raised);
    number *= share;
    total = total * share + EXP2(sink - raised);
"""


def with_sinks(body: str, *, has_sinks: bool) -> str:
    """Return `ATTEND_WHOLE` or `MERGE` for models with or without sinks."""
    return body.replace("TAKE_SINK", _TAKE_SINK if has_sinks else "")
