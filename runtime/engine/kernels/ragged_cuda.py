"""Ragged decode attention for CUDA: one query a row, per-row starts, no mask, and the new entry written in place.

MLX's fused CUDA attention takes no array mask, and its masked path is about four times slower. Here a block takes one
row, one KV head and one share of the row's places: eight lanes share a key, sixteen keys are in flight, and all query
heads of the KV head are served from one load. With few rows the places are split over blocks, and a second kernel
combines their partial softmaxes (flash decoding's split-K).

Writing the new key and value here saves two slice updates a layer and leaves no donation question: the buffer is an
input, never an output. That is safe because later readers of the buffer are evaluated after this step was submitted,
on the same stream, and no other block reads the place that is written. Nothing that changes from step to step is a
template value: each would be compiled anew.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

THREADS = 128
FULL_DEVICE_BLOCKS = 396
"""Three blocks on each of an H100's or H200's 132 multiprocessors."""
LEAST_SHARE = 128
"""Places below which another split costs more than it brings."""

_ATTEND = r"""
constexpr int LPK = 8;
constexpr int EPL = D / LPK;
constexpr int NG = 16;
constexpr int NV = EPL / 8;
__shared__ float sm[NG][G];
__shared__ float sl[NG][G];
__shared__ float so[NG][D];
const int cap = place[0], cursor = place[1], splits = gridDim.x;
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane / LPK, li = lane % LPK, kg = warp * 4 + sub;
const int s = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
const int start = starts[b];
const int share = (cursor + 1 - start + splits - 1) / splits;
const int begin = start + s * share;
const int end = begin + share < cursor + 1 ? begin + share : cursor + 1;
const size_t one = (size_t)(b * KVH + h);
if (begin >= end) {
  if (SPLIT && threadIdx.x < G) { pl[(one * G + threadIdx.x) * splits + s] = 0.f; }
  return;
}
const float sc = scale[0];
float qr[G][EPL], acc[G][EPL], m[G], l[G];
#pragma unroll
for (int g = 0; g < G; g++) {
  m[g] = -1e30f; l[g] = 0.f;
  const T* qp = q + (one * G + g) * D + li * EPL;
  #pragma unroll
  for (int e = 0; e < EPL; e++) { qr[g][e] = static_cast<float>(qp[e]) * sc; acc[g][e] = 0.f; }
}
const int iters = (end - begin + NG - 1) / NG;
for (int it = 0; it < iters; it++) {
  const int j = begin + it * NG + kg;
  const bool ok = j < end;
  const bool fresh = ok && j == cursor;
  const size_t at = (one * cap + (ok ? j : begin)) * D + li * EPL;
  const size_t now = one * D + li * EPL;
  const uint4* kp = reinterpret_cast<const uint4*>(fresh ? kn + now : k + at);
  const uint4* vp = reinterpret_cast<const uint4*>(fresh ? vn + now : v + at);
  uint4 kr[NV], vr[NV];
  #pragma unroll
  for (int n = 0; n < NV; n++) { kr[n] = kp[n]; vr[n] = vp[n]; }
  if (fresh) {
    uint4* kw = reinterpret_cast<uint4*>(const_cast<T*>(k) + at);
    uint4* vw = reinterpret_cast<uint4*>(const_cast<T*>(v) + at);
    #pragma unroll
    for (int n = 0; n < NV; n++) { kw[n] = kr[n]; vw[n] = vr[n]; }
  }
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
  const size_t head = one * G + g;
  for (int d = threadIdx.x; d < D; d += 128) {
    float o = 0.f;
    for (int i = 0; i < NG; i++) o += __expf(sm[i][g] - top) * so[i][d];
    if (SPLIT) po[(head * splits + s) * D + d] = o;
    else po[head * D + d] = o / total;
  }
  if (SPLIT && threadIdx.x == 0) { pm[head * splits + s] = top; pl[head * splits + s] = total; }
}
"""

_COMBINE = r"""
const int splits = count[0];
const int d = threadIdx.x, h = blockIdx.y, b = blockIdx.z;
const size_t base = ((size_t)b * gridDim.y + h) * splits;
float top = -1e30f;
for (int s = 0; s < splits; s++) if (pl[base + s] > 0.f) top = fmaxf(top, pm[base + s]);
float o = 0.f, total = 0.f;
for (int s = 0; s < splits; s++) {
  if (pl[base + s] > 0.f) {
    const float w = __expf(pm[base + s] - top);
    o += w * po[(base + s) * D + d];
    total += w * pl[base + s];
  }
}
out[((size_t)b * gridDim.y + h) * D + d] = static_cast<T>(o / total);
"""


class CudaRaggedAttention:
    """See the module; see `RaggedAttention` for the arguments."""

    def __init__(self) -> None:
        kernel: Any = mx.fast.cuda_kernel
        inputs = ["q", "k", "v", "kn", "vn", "starts", "place", "scale"]
        self._attend = kernel(name="ragged_attend", input_names=inputs, output_names=["po", "pm", "pl"], source=_ATTEND)
        self._whole = kernel(
            name="ragged_attend_whole",
            input_names=inputs,
            output_names=["po"],
            source=_ATTEND.replace("pl[", "unused[").replace("pm[", "unused["),
            header="static __device__ float unused[1];",
        )
        self._combine = kernel(
            name="ragged_combine", input_names=["po", "pm", "pl", "count"], output_names=["out"], source=_COMBINE
        )
        self._scales: dict[float, mx.array] = {}
        self._counts: dict[int, mx.array] = {}

    def fits(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
        """16-bit, head size 64, 128 or 256 shared by values, up to 8 query heads a KV head."""
        sizes = head_dim == value_dim and head_dim in (64, 128, 256)
        return sizes and dtype in (mx.bfloat16, mx.float16) and heads // kv_heads <= 8

    def splits(self, rows: int, kv_heads: int, longest: int) -> int:
        """Blocks that share a row and KV head: enough to fill the device, each with some places to read."""
        wanted = -(-FULL_DEVICE_BLOCKS // (rows * kv_heads))
        return 1 if wanted <= 2 else max(1, min(wanted, longest // LEAST_SHARE))

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        new_keys: mx.array,
        new_values: mx.array,
        starts: mx.array,
        place: mx.array,
        splits: int,
        scale: float,
    ) -> mx.array:
        """See `RaggedAttention.__call__`."""
        rows, heads, _, dim = queries.shape
        kv_heads = keys.shape[1]
        factor = self._scales.get(scale)
        if factor is None:
            factor = self._scales[scale] = mx.array([scale], dtype=mx.float32)
        call: dict[str, Any] = {
            "inputs": [queries, keys, values, new_keys, new_values, starts, place, factor],
            "grid": (splits * THREADS, kv_heads, rows),
            "threadgroup": (THREADS, 1, 1),
        }
        template = [("T", queries.dtype), ("D", dim), ("G", heads // kv_heads), ("KVH", kv_heads)]
        if splits == 1:
            out: mx.array = self._whole(
                **call,
                template=[*template, ("SPLIT", False)],
                output_shapes=[(rows, heads, 1, dim)],
                output_dtypes=[queries.dtype],
            )[0]
            return out
        partial = self._attend(
            **call,
            template=[*template, ("SPLIT", True)],
            output_shapes=[(rows, heads, splits, dim), (rows, heads, splits), (rows, heads, splits)],
            output_dtypes=[mx.float32, mx.float32, mx.float32],
        )
        if splits not in self._counts:
            self._counts[splits] = mx.array([splits], dtype=mx.int32)
        combined: mx.array = self._combine(
            inputs=[*partial, self._counts[splits]],
            template=template[:2],
            grid=(dim, heads, rows),
            threadgroup=(dim, 1, 1),
            output_shapes=[(rows, heads, 1, dim)],
            output_dtypes=[queries.dtype],
        )[0]
        return combined
