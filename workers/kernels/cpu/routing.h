// Which experts a token passes, and with which weights: `route` of workers/models/layers/routing.py, one token at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace routing {

enum Scoring : int64_t { softmax, sigmoid, softmax_of_chosen };

// `_RoutingRule` in experts.py.
struct Rule {
    int64_t num_experts, num_chosen, scoring, renormalised, num_groups, num_chosen_groups, by_two;
    float epsilon, factor;
    const float* bias;        // of the logits, or null
    const float* correction;  // of the scores for the choice, or null
};

constexpr float lowest = -std::numeric_limits<float>::infinity();

// The highest of values [begin, end), of equal ones the first; it is taken out. -1: all were.
inline int64_t take_highest(float* values, int64_t begin, int64_t end) {
    int64_t best = -1;
    float highest = lowest;
    for (int64_t i = begin; i < end; i++)
        if (values[i] > highest) highest = values[i], best = i;
    if (best >= 0) values[best] = lowest;
    return best;
}

// The groups that are not chosen lose all their values. `scores` has room for the groups.
inline void keep_chosen_groups(const Rule& by, float* choice, float* scores) {
    const int64_t size = by.num_experts / by.num_groups;
    for (int64_t group = 0; group < by.num_groups; group++) {
        float first = lowest, second = lowest;
        for (int64_t i = group * size; i < (group + 1) * size; i++)
            if (choice[i] > first) second = first, first = choice[i];
            else if (choice[i] > second) second = choice[i];
        scores[group] = by.by_two ? first + second : first;
    }
    for (int64_t nth = 0; nth < by.num_groups - by.num_chosen_groups; nth++) {  // of equal groups the last one goes first
        int64_t worst = -1;
        for (int64_t group = 0; group < by.num_groups; group++)
            if (!std::isnan(scores[group]) && (worst < 0 || scores[group] <= scores[worst])) worst = group;
        scores[worst] = std::numeric_limits<float>::quiet_NaN();
        for (int64_t i = worst * size; i < (worst + 1) * size; i++) choice[i] = lowest;
    }
}

// False: a logit is not finite. `room` has 2 num_experts + num_groups floats. Logits are changed: the bias is added.
inline bool route(const Rule& by, float* logits, float* room, int32_t* chosen, float* weights) {
    const int64_t count = by.num_experts;
    float *choice = room, *scores = room + count, highest = lowest;
    for (int64_t i = 0; i < count; i++) {
        if (by.bias != nullptr) logits[i] += by.bias[i];
        if (!std::isfinite(logits[i])) return false;
        highest = logits[i] > highest ? logits[i] : highest;
    }
    for (int64_t i = 0; i < count; i++) {
        scores[i] = by.scoring == sigmoid ? float(1.0 / (1.0 + std::exp(-double(logits[i])))) : logits[i];
        choice[i] = by.correction != nullptr ? scores[i] + by.correction[i] : scores[i];
    }
    if (by.num_chosen_groups < by.num_groups) keep_chosen_groups(by, choice, scores + count);
    double sum = 0;
    if (by.scoring == softmax)
        for (int64_t i = 0; i < count; i++) sum += scores[i] = std::exp(logits[i] - highest);
    for (int64_t slot = 0; slot < by.num_chosen; slot++) {
        const int64_t best = take_highest(choice, 0, count);
        if (best < 0) return false;  // a correction that is not finite
        chosen[slot] = int32_t(best);
        weights[slot] = by.scoring == softmax ? float(scores[best] / sum) : scores[best];
    }
    if (by.scoring == softmax_of_chosen) {
        for (int64_t slot = 0; slot < by.num_chosen; slot++) sum += weights[slot] = std::exp(weights[slot] - highest);
        for (int64_t slot = 0; slot < by.num_chosen; slot++) weights[slot] = float(weights[slot] / sum);
    }
    if (by.renormalised) {
        float total = 0;
        for (int64_t slot = 0; slot < by.num_chosen; slot++) total += weights[slot];
        for (int64_t slot = 0; slot < by.num_chosen; slot++) weights[slot] /= total + by.epsilon;
    }
    for (int64_t slot = 0; slot < by.num_chosen; slot++) weights[slot] *= by.factor;
    return true;
}

}  // namespace routing
