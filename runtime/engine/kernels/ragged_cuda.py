"""Ragged decode attention for CUDA: split over keys, per-row starts, no mask.

MLX's fused CUDA attention takes no array mask, and its masked path is about four times slower. Here each block takes one
row, one KV head and one stretch of TILE keys: eight lanes share a key, sixteen keys are in flight a block, all query
heads of the KV head are served from one load of keys and values, and partial softmaxes are combined by a second kernel
(the split-K scheme of flash decoding). Nothing that changes from step to step is a template value: each would be
compiled anew.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

TILE = 256
LANES = 8

_SPLIT = r"""
constexpr int LPK = 8;
constexpr int EPL = D / LPK;
constexpr int NG = 16;
constexpr int NV = EPL / 8;
__shared__ float sm[NG][G];
__shared__ float sl[NG][G];
__shared__ float so[NG][D];
const int cap = shape[0], tile = shape[1], splits = shape[2], low = shape[3], high = shape[4], kvh = shape[5];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane / LPK, li = lane % LPK, kg = warp * 4 + sub;
const int s = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
const int first = low + s * tile;
const int begin = starts[b] > first ? starts[b] : first;
const int end = high < first + tile ? high : first + tile;
if (begin >= end) return;
const float sc = scale[0];
float qr[G][EPL], acc[G][EPL], m[G], l[G];
#pragma unroll
for (int g = 0; g < G; g++) {
  m[g] = -1e30f; l[g] = 0.f;
  const T* qp = q + ((size_t)(b * kvh + h) * G + g) * D + li * EPL;
  #pragma unroll
  for (int e = 0; e < EPL; e++) { qr[g][e] = static_cast<float>(qp[e]) * sc; acc[g][e] = 0.f; }
}
const size_t base = ((size_t)(b * kvh + h)) * cap * D;
const int iters = (end - begin + NG - 1) / NG;
for (int it = 0; it < iters; it++) {
  const int j = begin + it * NG + kg;
  const bool ok = j < end;
  const size_t at = base + (size_t)(ok ? j : begin) * D + li * EPL;
  const uint4* kp = reinterpret_cast<const uint4*>(k + at);
  const uint4* vp = reinterpret_cast<const uint4*>(v + at);
  uint4 kr[NV], vr[NV];
  #pragma unroll
  for (int n = 0; n < NV; n++) { kr[n] = kp[n]; vr[n] = vp[n]; }
  const T* kf = reinterpret_cast<const T*>(kr);
  const T* vf = reinterpret_cast<const T*>(vr);
  float vv[EPL];
  #pragma unroll
  for (int e = 0; e < EPL; e++) vv[e] = static_cast<float>(vf[e]);
  #pragma unroll
  for (int g = 0; g < G; g++) {
    float d = 0.f;
    #pragma unroll
    for (int e = 0; e < EPL; e++) d += qr[g][e] * static_cast<float>(kf[e]);
    d += __shfl_xor_sync(0xffffffffu, d, 1);
    d += __shfl_xor_sync(0xffffffffu, d, 2);
    d += __shfl_xor_sync(0xffffffffu, d, 4);
    if (ok) {
      const float top = fmaxf(m[g], d);
      const float fade = __expf(m[g] - top), p = __expf(d - top);
      l[g] = l[g] * fade + p; m[g] = top;
      #pragma unroll
      for (int e = 0; e < EPL; e++) acc[g][e] = acc[g][e] * fade + p * vv[e];
    }
  }
}
#pragma unroll
for (int g = 0; g < G; g++) if (li == 0) { sm[kg][g] = m[g]; sl[kg][g] = l[g]; }
#pragma unroll
for (int g = 0; g < G; g++) {
  __syncthreads();
  #pragma unroll
  for (int e = 0; e < EPL; e++) so[kg][li * EPL + e] = acc[g][e];
  __syncthreads();
  float top = -1e30f;
  for (int i = 0; i < NG; i++) top = fmaxf(top, sm[i][g]);
  float total = 0.f;
  for (int i = 0; i < NG; i++) total += __expf(sm[i][g] - top) * sl[i][g];
  const size_t idx = ((size_t)(b * kvh + h) * G + g) * splits + s;
  for (int d = threadIdx.x; d < D; d += 128) {
    float o = 0.f;
    for (int i = 0; i < NG; i++) o += __expf(sm[i][g] - top) * so[i][d];
    po[idx * D + d] = o;
  }
  if (threadIdx.x == 0) { pm[idx] = top; pl[idx] = total; }
}
"""

_COMBINE = r"""
const int tile = shape[1], splits = shape[2], low = shape[3], high = shape[4], heads = shape[6];
const int d = threadIdx.x, h = blockIdx.y, b = blockIdx.z;
const int s0 = (starts[b] > low ? starts[b] - low : 0) / tile, s1 = (high - 1 - low) / tile;
const size_t base = ((size_t)b * heads + h) * splits;
float top = -1e30f;
for (int s = s0; s <= s1; s++) top = fmaxf(top, pm[base + s]);
float o = 0.f, total = 0.f;
for (int s = s0; s <= s1; s++) {
  const float w = __expf(pm[base + s] - top);
  o += w * po[(base + s) * D + d];
  total += w * pl[base + s];
}
out[((size_t)b * heads + h) * D + d] = static_cast<T>(o / total);
"""


class CudaRaggedAttention:
    """See the module; see `RaggedAttention` for the arguments."""

    def __init__(self) -> None:
        kernel: Any = mx.fast.cuda_kernel
        self._split = kernel(
            name="ragged_split",
            input_names=["q", "k", "v", "starts", "shape", "scale"],
            output_names=["po", "pm", "pl"],
            source=_SPLIT,
        )
        self._combine = kernel(
            name="ragged_combine",
            input_names=["po", "pm", "pl", "starts", "shape"],
            output_names=["out"],
            source=_COMBINE,
        )
        self._scales: dict[float, mx.array] = {}
        self._shapes: dict[tuple[int, ...], mx.array] = {}

    def fits(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
        """16-bit, head size 64, 128 or 256 shared by values, up to 8 query heads a KV head."""
        sizes = head_dim == value_dim and head_dim in (64, 128, 256)
        return sizes and dtype in (mx.bfloat16, mx.float16) and heads // kv_heads <= 8

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, starts: mx.array, low: int, high: int, scale: float
    ) -> mx.array:
        """See `RaggedAttention.__call__`."""
        rows, heads, _, dim = queries.shape
        kv_heads, capacity = keys.shape[1], keys.shape[2]
        splits = -(-(high - low) // TILE)
        shape = self._array(self._shapes, (capacity, TILE, splits, low, high, kv_heads, heads), mx.int32)
        factor = self._scales.get(scale)
        if factor is None:
            factor = self._scales[scale] = mx.array([scale], dtype=mx.float32)
        template = [("T", queries.dtype), ("D", dim), ("G", heads // kv_heads)]
        partial = self._split(
            inputs=[queries, keys, values, starts, shape, factor],
            template=template,
            grid=(splits * 128, kv_heads, rows),
            threadgroup=(128, 1, 1),
            output_shapes=[(rows, heads, splits, dim), (rows, heads, splits), (rows, heads, splits)],
            output_dtypes=[mx.float32, mx.float32, mx.float32],
        )
        out: mx.array = self._combine(
            inputs=[*partial, starts, shape],
            template=template[:2],
            grid=(dim, heads, rows),
            threadgroup=(dim, 1, 1),
            output_shapes=[(rows, heads, 1, dim)],
            output_dtypes=[queries.dtype],
        )[0]
        return out

    @staticmethod
    def _array(known: dict[tuple[int, ...], mx.array], key: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """The same array for all layers of a step."""
        if key not in known:
            known.clear()
            known[key] = mx.array(key, dtype=dtype)
        return known[key]
