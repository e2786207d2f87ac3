"""RMS norm in Triton, alone or with the residual stream added first: one read and one write of each element.

Legend: R rows, E hidden size (the normed dimension), T tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stream_ptr,
    num_rows,
    inner_rows,
    x_outer_stride,
    x_inner_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Rows [ROWS * id, ROWS * (id + 1)). It rounds where `reference` rounds, so that only the sum can differ."""
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_E = tl.arange(0, BLOCK)
    inside_RE = (rows_R < num_rows)[:, None] & (columns_E < SIZE)[None, :]
    read_R = rows_R // inner_rows * x_outer_stride + rows_R % inner_rows * x_inner_stride
    written_RE = rows_R[:, None] * SIZE + columns_E[None, :]
    x_RE = tl.load(x_ptr + read_R[:, None] + columns_E[None, :], mask=inside_RE, other=0.0)
    if ADD:
        residual_RE = tl.load(residual_ptr + written_RE, mask=inside_RE, other=0.0)
        x_RE = (x_RE.to(tl.float32) + residual_RE.to(tl.float32)).to(x_RE.dtype)
        tl.store(stream_ptr + written_RE, x_RE, mask=inside_RE)
    wide_RE = x_RE.to(tl.float32)
    mean_R = tl.sum(wide_RE * wide_RE, axis=1) / SIZE
    weight_E = tl.load(weight_ptr + columns_E, mask=columns_E < SIZE, other=0.0)
    normed_RE = (wide_RE * tl.rsqrt(mean_R + eps)[:, None]).to(weight_E.dtype)
    out_RE = weight_E.to(tl.float32)[None, :] * normed_RE.to(tl.float32)
    tl.store(out_ptr + written_RE, out_RE.to(x_RE.dtype), mask=inside_RE)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`reference.rms_norm`. `x` is [..., E] with 2 or 3 dimensions and may be a view: only E must be contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.add_rms_norm`. The residual must be contiguous; `x_TE` may be a view as in `rms_norm`."""
    assert residual_TE.shape == x_TE.shape, f"residual {tuple(residual_TE.shape)} for x {tuple(x_TE.shape)}"
    assert residual_TE.is_contiguous(), f"residual has strides {residual_TE.stride()}"
    out_TE, stream_TE = torch.empty_like(residual_TE), torch.empty_like(residual_TE)
    _launch(x_TE, residual_TE, weight_E, out_TE, stream_TE, eps)
    return out_TE, stream_TE


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight_E: torch.Tensor,
    out: torch.Tensor,
    stream: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    assert x.dim() in (2, 3), f"x has shape {tuple(x.shape)}"
    assert x.stride(-1) == 1, f"x has strides {x.stride()}"
    assert weight_E.shape == (size,), f"weight {tuple(weight_E.shape)} for rows of {size}"
    assert weight_E.is_contiguous(), f"weight has strides {weight_E.stride()}"
    assert weight_E.dtype in (x.dtype, torch.float32), f"weight is {weight_E.dtype}, x {x.dtype}"
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    # A program holds whole rows in registers: 2,048 elements or one row, 16 a thread (two loads of 16 bytes in
    # bfloat16 under way at once). Chosen by reasoning, not measured yet.
    rows = max(1, 2048 // block)
    num_warps = min(16, max(1, rows * block // 512))
    inner_rows = x.shape[1] if x.dim() == 3 else 1
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight_E,
        out,
        out if stream is None else stream,
        num_rows,
        inner_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else size,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        num_warps=num_warps,
    )
