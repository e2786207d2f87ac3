// Attention over keys and values in 8 bits (attention_rounded.cpp), with the arguments of attention.cpp.
#pragma once

#include "attention.h"
#include "rounded.h"

namespace paged {

void attend_rounded(const float* q, const Cache& cache, float* out, const Batch& batch, const Shape& shape, int num_threads);
void attend_rounded(const bfloat16* q, const Cache& cache, bfloat16* out, const Batch& batch, const Shape& shape,
                    int num_threads);

}  // namespace paged
