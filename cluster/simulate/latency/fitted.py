"""Coefficients of kernels, written by `python -m benchmarks.simulation.step_fit`: change that instead.

Source: aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), its measured kernels of trtllm.
"""

from __future__ import annotations

from cluster.simulate.latency.kernels import AllReduceTimes, AttentionTimes, KernelTimes, ProductTimes

FITTED: dict[str, KernelTimes] = {
    "a100": KernelTimes(
        products={"bfloat16": ProductTimes(compute_share=0.825, memory_share=0.777, sharpness=1.86, fixed_s=6.39e-06)},
        experts={"bfloat16": ProductTimes(compute_share=0.464, memory_share=1.0, sharpness=1.08, fixed_s=0.000102)},
        attention=AttentionTimes(
            compute_share=0.433,
            memory_share=1.0,
            prefill_fixed_s=3.09e-05,
            decode_fixed_s=1.75e-05,
            element_s=7.36e-12,
            row_s=3.57e-11,
        ),
        latent=AttentionTimes(
            compute_share=0.543,
            memory_share=0.296,
            prefill_fixed_s=4.78e-06,
            decode_fixed_s=0.000143,
            element_s=8.85e-12,
            row_s=1e-15,
        ),
        reduce=AllReduceTimes(small_fixed_s=4.45e-06, small_share=0.375, large_fixed_s=4.73e-05, large_share=0.65),
    ),
    "h100": KernelTimes(
        products={
            "bfloat16": ProductTimes(compute_share=0.778, memory_share=0.831, sharpness=4.71, fixed_s=3.77e-06),
            "fp8": ProductTimes(compute_share=0.598, memory_share=0.803, sharpness=3.46, fixed_s=1.32e-05),
            "fp8_block": ProductTimes(compute_share=0.549, memory_share=0.962, sharpness=1.0, fixed_s=7.14e-06),
        },
        experts={
            "bfloat16": ProductTimes(compute_share=0.536, memory_share=1.0, sharpness=1.03, fixed_s=5.8e-05),
            "fp8": ProductTimes(compute_share=0.0688, memory_share=1.0, sharpness=1.0, fixed_s=9.21e-05),
            "fp8_block": ProductTimes(compute_share=0.0688, memory_share=1.0, sharpness=1.0, fixed_s=9.21e-05),
        },
        attention=AttentionTimes(
            compute_share=0.547,
            memory_share=0.869,
            prefill_fixed_s=2.84e-05,
            decode_fixed_s=1.28e-05,
            element_s=4.51e-12,
            row_s=2.9e-09,
        ),
        latent=AttentionTimes(
            compute_share=0.585,
            memory_share=0.919,
            prefill_fixed_s=1.47e-05,
            decode_fixed_s=2.03e-05,
            element_s=7.57e-12,
            row_s=1e-15,
        ),
        reduce=AllReduceTimes(small_fixed_s=2.74e-06, small_share=0.577, large_fixed_s=2.77e-05, large_share=0.716),
    ),
    "h200": KernelTimes(
        products={
            "bfloat16": ProductTimes(compute_share=0.786, memory_share=0.831, sharpness=4.03, fixed_s=4.11e-06),
            "fp8": ProductTimes(compute_share=0.62, memory_share=0.805, sharpness=3.16, fixed_s=1.33e-05),
            "fp8_block": ProductTimes(compute_share=0.521, memory_share=0.971, sharpness=1.0, fixed_s=7.45e-06),
        },
        experts={
            "bfloat16": ProductTimes(compute_share=0.58, memory_share=1.0, sharpness=1.13, fixed_s=5.48e-05),
            "fp8": ProductTimes(compute_share=0.0724, memory_share=0.898, sharpness=1.0, fixed_s=9.35e-05),
            "fp8_block": ProductTimes(compute_share=0.0724, memory_share=0.898, sharpness=1.0, fixed_s=9.35e-05),
        },
        attention=AttentionTimes(
            compute_share=0.539,
            memory_share=0.848,
            prefill_fixed_s=2.86e-05,
            decode_fixed_s=1.43e-05,
            element_s=4.04e-12,
            row_s=4.66e-09,
        ),
        latent=AttentionTimes(
            compute_share=0.651,
            memory_share=0.862,
            prefill_fixed_s=1.1e-05,
            decode_fixed_s=1.89e-05,
            element_s=9.83e-12,
            row_s=1e-15,
        ),
        reduce=AllReduceTimes(small_fixed_s=2.67e-06, small_share=0.595, large_fixed_s=2.07e-05, large_share=0.695),
    ),
    "b200": KernelTimes(
        products={
            "bfloat16": ProductTimes(compute_share=0.668, memory_share=0.769, sharpness=3.35, fixed_s=3.46e-06),
            "fp8": ProductTimes(compute_share=0.547, memory_share=0.756, sharpness=1.83, fixed_s=1.55e-05),
            "fp8_block": ProductTimes(compute_share=0.667, memory_share=0.914, sharpness=1.0, fixed_s=7.76e-06),
        },
        experts={
            "fp8": ProductTimes(compute_share=0.109, memory_share=0.643, sharpness=1.25, fixed_s=9.33e-05),
            "fp8_block": ProductTimes(compute_share=0.109, memory_share=0.643, sharpness=1.25, fixed_s=9.33e-05),
        },
        attention=AttentionTimes(
            compute_share=0.519,
            memory_share=0.919,
            prefill_fixed_s=3.14e-05,
            decode_fixed_s=1.1e-05,
            element_s=3.3e-12,
            row_s=1.06e-10,
        ),
        latent=AttentionTimes(
            compute_share=0.628,
            memory_share=0.611,
            prefill_fixed_s=1.52e-05,
            decode_fixed_s=1.45e-05,
            element_s=4.1e-12,
            row_s=3.66e-09,
        ),
        reduce=AllReduceTimes(small_fixed_s=4.63e-06, small_share=0.537, large_fixed_s=2.41e-05, large_share=0.548),
    ),
}
