#include "weights.h"

#include "ggml-backend-impl.h"

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct answers {
    std::mutex                               mutex;
    std::map<std::string, std::set<ggml_op>> offered;  // by name
    std::set<std::string>                    refused;
};

// Never destroyed: graphs may be computed by destructors.
answers & all() {
    static auto * instance = new answers;
    return *instance;
}

}  // namespace

void neuron_note_weight(const ggml_tensor * op, const ggml_tensor * weight, bool takes) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().offered[weight->name].insert(op->op);
    if (takes) {
        all().refused.erase(weight->name);
    } else {
        all().refused.insert(weight->name);
    }
}

bool neuron_refused_weight(const ggml_tensor * weight) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    return all().refused.count(weight->name) != 0;
}

bool neuron_is_weight(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool neuron_is_kept_by_host(const ggml_tensor * op) {
    if (op->op != GGML_OP_GET_ROWS || !neuron_is_weight(op->src[0])) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(all().mutex);
    if (all().offered.empty()) {
        return false;  // the program asks nothing of its weights
    }
    const auto found = all().offered.find(op->src[0]->name);
    return found == all().offered.end() || found->second.count(GGML_OP_GET_ROWS) == 0;
}
