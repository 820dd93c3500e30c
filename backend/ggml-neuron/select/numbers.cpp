#include "select/numbers.h"

#include <cstring>

// SCALE has two: the factor and the summand, in the first word of a key's parameters.
static constexpr size_t   N_NUMBERS = 2;
static constexpr size_t   LAST      = NEURON_OPEN_WORD / 2;  // the word whose high half marks open parameters
static constexpr uint64_t OPEN      = ((uint64_t) 1 << N_NUMBERS) - 1;

static neuron_params opened(neuron_params params) {
    params.front() = 0;
    params[LAST]   = (params[LAST] & 0xFFFFFFFF) | OPEN << 32;
    return params;
}

bool neuron_has_numbers(const ggml_tensor * node) {
    return node->op == GGML_OP_SCALE;
}

size_t neuron_count_numbers(const ggml_tensor * node) {
    return neuron_has_numbers(node) ? N_NUMBERS : 0;
}

neuron_params neuron_params_of(const ggml_tensor * node) {
    neuron_params params;
    static_assert(sizeof(params) == sizeof(node->op_params), "parameters are words of a key");
    memcpy(params.data(), node->op_params, sizeof(params));
    return params;
}

neuron_params neuron_open_params_of(const ggml_tensor * node) {
    return neuron_has_numbers(node) ? opened(neuron_params_of(node)) : neuron_params_of(node);
}

void neuron_open(const neuron_key_node & node, neuron_params & params) {
    params = node.op == neuron_key_ops::get().scale ? opened(params) : params;
}

bool neuron_is_open(const neuron_key_node & node) {
    return node.op == neuron_key_ops::get().scale && node.params[LAST] >> 32 == OPEN;
}

void neuron_add_numbers(const ggml_tensor * node, std::vector<float> & numbers) {
    const size_t n = numbers.size();
    numbers.resize(n + neuron_count_numbers(node));
    memcpy(numbers.data() + n, node->op_params, (numbers.size() - n) * sizeof(float));
}
