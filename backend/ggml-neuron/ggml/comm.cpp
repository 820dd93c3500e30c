#include "ggml/comm.h"

#include "device/core.h"
#include "ggml-neuron.h"
#include "ggml/backend.h"
#include "ggml/buffers.h"
#include "ggml/chain.h"
#include "report/log.h"
#include "report/metrics.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct comm {
    std::vector<ggml_backend_neuron_context *> backends;
    std::unique_ptr<neuron_chain>              chain;

    // Work memory of reductions, one at a time: a partial result, and the sum.
    std::vector<float> partial;
    std::vector<float> sum;
};

// Returns "" or the failure.
std::string read_partial(const ggml_tensor * t, float * data) {
    const size_t size = ggml_nbytes(t);
    if (const neuron_buffer * on_core = neuron_buffer_of(t)) {
        return on_core->memory->read(data, on_core->offset_of(t), size);
    }
    memcpy(data, t->data, size);  // graphs of tensors in host memory are complete when graph_compute returns
    return "";
}

std::string write_sum(const ggml_tensor * t, const float * data) {
    const size_t size = ggml_nbytes(t);
    if (const neuron_buffer * on_core = neuron_buffer_of(t)) {
        return on_core->memory->write(data, on_core->offset_of(t), size);
    }
    memcpy(t->data, data, size);
    return "";
}

// Returns whether this code can add a tensor and write its sum in place.
bool is_reducible(const comm & c, size_t rank, const ggml_tensor * first, const ggml_tensor * t) {
    if (t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t) || !ggml_are_same_shape(first, t)) {
        return false;
    }
    if (const neuron_buffer * on_core = neuron_buffer_of(t)) {
        return on_core->core == c.backends[rank]->device->core.get();
    }
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(t);
    return buffer && ggml_backend_buffer_is_host(buffer);
}

std::string reduce(comm & c, ggml_tensor ** tensors) {
    const auto n = (size_t) ggml_nelements(tensors[0]);
    c.partial.resize(n);
    c.sum.assign(n, 0.0F);
    bool first = true;
    for (size_t rank = 0; rank < c.backends.size(); rank++) {
        if (!(tensors[rank]->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }
        const std::string failure = read_partial(tensors[rank], first ? c.sum.data() : c.partial.data());
        if (!failure.empty()) {
            return failure;
        }
        if (!first) {
            std::transform(c.sum.begin(), c.sum.end(), c.partial.begin(), c.sum.begin(), std::plus<float>());
        }
        first = false;
    }
    for (size_t rank = 0; rank < c.backends.size(); rank++) {
        const std::string failure = write_sum(tensors[rank], c.sum.data());
        if (!failure.empty()) {
            return failure;
        }
    }
    return "";
}

// Returns false on failure.
bool reduce_all(comm & c, ggml_tensor ** tensors) {
    const std::string failure = reduce(c, tensors);
    if (!failure.empty()) {
        NEURON_ERROR("the reduction of %s over %zu cores failed: %s\n", tensors[0]->name, c.backends.size(),
                     failure.c_str());
        c.chain->fail();
        return false;
    }
    g_metrics.reduced.fetch_add(2 * c.backends.size() * ggml_nbytes(tensors[0]), std::memory_order_relaxed);
    g_metrics.reductions.fetch_add(1, std::memory_order_relaxed);
    return true;
}

}  // namespace

void * ggml_backend_neuron_comm_init(ggml_backend_t * backends, size_t n_backends) {
    if (!std::all_of(backends, backends + n_backends, ggml_backend_is_neuron)) {
        return nullptr;
    }
    auto * c = new comm;
    for (size_t i = 0; i < n_backends; i++) {
        c->backends.push_back((ggml_backend_neuron_context *) backends[i]->context);
        c->backends.back()->device->n_comms++;
    }
    c->chain =
        std::make_unique<neuron_chain>(c->backends, [c](ggml_tensor ** tensors) { return reduce_all(*c, tensors); });
    for (ggml_backend_neuron_context * backend : c->backends) {
        backend->chain = c->chain.get();
    }
    return c;
}

void ggml_backend_neuron_comm_free(void * context) {
    auto * c = (comm *) context;
    for (ggml_backend_neuron_context * backend : c->backends) {
        backend->chain = nullptr;
        backend->device->n_comms--;
    }
    c->chain.reset();
    delete c;
}

bool ggml_backend_neuron_comm_allreduce_tensor(void * context, ggml_tensor ** tensors) {
    comm & c = *(comm *) context;
    for (size_t rank = 0; rank < c.backends.size(); rank++) {
        if (!is_reducible(c, rank, tensors[0], tensors[rank])) {
            return false;
        }
    }
    if (!c.chain->append(tensors)) {
        (void) reduce_all(c, tensors);
    }
    return true;
}
