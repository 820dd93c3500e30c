#include "weights/weights.h"

#include "ggml-backend-impl.h"
#include "select/tensors.h"

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct answers {
    std::mutex                               mutex;
    std::map<std::string, std::set<ggml_op>> offered;  // by key_of
    std::set<std::string>                    refused;
};

// Never destroyed: destructors may still compute graphs.
answers & all() {
    static auto * instance = new answers;
    return *instance;
}

std::string key_of(const ggml_tensor * weight) {
    std::string key = weight->name;
    for (const int64_t number :
         { (int64_t) weight->type, weight->ne[0], weight->ne[1], weight->ne[2], weight->ne[3] }) {
        key += ' ' + std::to_string(number);
    }
    return key;
}

}  // namespace

void neuron_note_weight(const ggml_tensor * op, const ggml_tensor * weight, bool takes) {
    const std::string                 key = key_of(weight);
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().offered[key].insert(op->op);
    if (takes) {
        all().refused.erase(key);
    } else {
        all().refused.insert(key);
    }
}

bool neuron_refused_weight(const ggml_tensor * weight) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    return all().refused.count(key_of(weight)) != 0;
}

bool neuron_is_offered_weight(const ggml_tensor * t) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    return all().offered.count(key_of(t)) != 0;
}

bool neuron_is_weight(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(t);
    return buffer && buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool neuron_is_kept_by_host(const ggml_tensor * op) {
    if (op->op != GGML_OP_GET_ROWS || !neuron_is_weight(op->src[0]) ||
        !ggml_backend_buffer_is_host(neuron_buffer_of_root(op->src[0]))) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(all().mutex);
    if (all().offered.empty()) {
        return false;  // the program never calls supports_op for its weights
    }
    const auto found = all().offered.find(key_of(op->src[0]));
    return found == all().offered.end() || found->second.count(GGML_OP_GET_ROWS) == 0;
}
