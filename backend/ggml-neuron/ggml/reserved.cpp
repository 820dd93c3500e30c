#include "ggml/reserved.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml/device_context.h"
#include "report/log.h"
#include "report/manifest_text.h"
#include "report/missing.h"
#include "report/record_ops.h"
#include "select/tensors.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

struct reservation {
    size_t                                  n_cores   = 0;  // 0: nothing is noted
    bool                                    splitting = false;
    std::vector<const ggml_tensor *>        asked{};
    std::unordered_set<const ggml_tensor *> known{};
    std::vector<const ggml_tensor *>        parts{};  // parts of the copy that is being made
};

reservation & mine() {
    static thread_local reservation own;
    return own;
}

bool is_of_meta_device(const ggml_backend_buffer_t buffer) {
    return buffer && ggml_backend_buft_is_meta(buffer->buft);
}

// Returns whether a tensor is a weight or a cache, whose parts exist.
bool is_lasting(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && !t->view_src && is_of_meta_device(t->buffer) &&
           ggml_backend_buffer_get_usage(t->buffer) != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// Returns whether a tensor is an input, or in another backend's memory.
bool is_input(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = neuron_buffer_of_root(t);
    return t->op == GGML_OP_NONE || (buffer && !is_of_meta_device(buffer));
}

template <typename F> void for_each_source(const ggml_tensor * t, F function) {
    if (t->view_src) {
        function(t->view_src);
    }
    for (ggml_tensor * src : t->src) {
        if (src && src != t) {
            function(src);
        }
    }
}

// Copies of nodes and of their sources, for which the meta device makes parts.
class graph_copy {
  public:
    // Finds the tensors to copy, in an order with sources first.
    explicit graph_copy(const std::vector<const ggml_tensor *> & nodes) {
        std::unordered_set<const ggml_tensor *>           entered;
        std::vector<std::pair<const ggml_tensor *, bool>> stack;
        for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
            stack.emplace_back(*node, false);
        }
        while (!stack.empty()) {
            const auto [t, done] = stack.back();
            stack.pop_back();
            if (done) {
                order.push_back(t);
            } else if (is_lasting(t)) {
                // while llama.cpp only measures memory, weights have empty buffers
                whole = whole && t->buffer->context;
                buft  = t->buffer->buft;
            } else if (entered.insert(t).second) {
                stack.emplace_back(t, true);
                if (!is_input(t)) {
                    for_each_source(t, [&](const ggml_tensor * src) { stack.emplace_back(src, false); });
                }
            }
        }
    }

    bool is_possible() const { return whole && buft; }

    // Calls a function with each node and its parts. Throws an exception where ggml would end the program.
    template <typename F> void split(F function) {
        // ggml_backend_buft_alloc_buffer would make no buffer of 0 bytes
        buffer.reset(buft->iface.alloc_buffer(buft, NEURON_ALIGNMENT));
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
        tensors.reset(ggml_init({ (order.size() + 1) * ggml_tensor_overhead(), nullptr, true }));
        for (const ggml_tensor * t : order) {
            ggml_tensor * copy = make(t);
            mine().parts.clear();
            ggml_backend_buffer_init_tensor(buffer.get(), copy);
            function(t, mine().parts);
        }
    }

  private:
    ggml_tensor * copy_of(ggml_tensor * t) const { return is_lasting(t) ? t : copies.at(t); }

    ggml_tensor * make(const ggml_tensor * t) {
        ggml_tensor * copy = ggml_new_tensor(tensors.get(), t->type, GGML_MAX_DIMS, t->ne);
        *copy              = *t;
        copy->buffer       = buffer.get();
        copy->data         = ggml_backend_buffer_get_base(buffer.get());
        copy->extra        = nullptr;
        if (is_input(t)) {
            copy->op        = GGML_OP_NONE;
            copy->view_src  = nullptr;
            copy->view_offs = 0;
            std::fill(std::begin(copy->src), std::end(copy->src), nullptr);
        } else {
            copy->view_src = t->view_src ? copy_of(t->view_src) : nullptr;
            for (int i = 0; i < GGML_MAX_SRC; i++) {
                copy->src[i] = !t->src[i] ? nullptr : t->src[i] == t ? copy : copy_of(t->src[i]);
            }
        }
        copies[t] = copy;
        return copy;
    }

    std::vector<const ggml_tensor *>                       order;
    bool                                                   whole = true;
    ggml_backend_buffer_type_t                             buft  = nullptr;
    ggml_backend_buffer_ptr                                buffer;
    ggml_context_ptr                                       tensors;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies;
};

// ggml has one abort callback for all threads. The meta device keeps the split of a weight in the weight's buffer,
// which contexts of a model share. So one thread at a time splits graphs.
struct abort_hook {
    std::mutex                         one_thread{};
    std::atomic<ggml_abort_callback_t> previous{ nullptr };
};

abort_hook & the_hook() {
    static abort_hook hook;
    return hook;
}

// The meta device ends the program at a node that it can't split. It would do so if a program computed such a graph,
// which may never happen. The exception passes only through the meta device's functions, and leaks only memory
// of the copies' buffer.
void throw_while_splitting(const char * message) {
    if (mine().splitting) {
        throw std::runtime_error(message);
    }
    if (const ggml_abort_callback_t previous = the_hook().previous) {
        previous(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

// During the lifetime of such an object, an abort of ggml in this thread becomes an exception.
class splitting {
  public:
    splitting() : lock(the_hook().one_thread) {
        the_hook().previous = ggml_set_abort_callback(throw_while_splitting);
        mine().splitting    = true;
    }

    ~splitting() {
        mine().splitting = false;
        ggml_set_abort_callback(the_hook().previous);
    }

    splitting(const splitting &) = delete;

  private:
    std::lock_guard<std::mutex> lock;
};

// Returns whether kernels compute attention of the same heads, or gather rows of as many elements, for other numbers of
// tokens, cells or sequences: one kernel computes all of these. Memory is reserved for the longest call, and a program
// may never make it.
bool is_longer_than_kernels(const ggml_tensor * part) {
    const bool attends = part->op == GGML_OP_FLASH_ATTN_EXT;
    if (!attends && (part->op != GGML_OP_GET_ROWS || part->src[0]->op == GGML_OP_NONE)) {
        return false;
    }
    const neuron_signature wanted = neuron_signature_of(part);
    bool                   found  = false;
    ggml_backend_neuron_shared().kernels.for_each(wanted.op_hash, [&](const char *, const neuron_signature & kernel) {
        std::vector<std::string> others;
        neuron_add_param_differences(part, kernel.op_params, others);
        bool same = others.empty() && kernel.n_src == wanted.n_src;
        for (int i = 0; same && i <= wanted.n_src; i++) {
            const neuron_kernels_tensor & have = kernel.tensors[i];
            const neuron_kernels_tensor & want = wanted.tensors[i];
            same                               = have.type == want.type;
            if (same && (attends ? i < 3 : i != 1)) {
                same = have.ne[0] == want.ne[0] && (!attends || have.ne[2] == want.ne[2]);
            }
        }
        found = found || same;
    });
    return found;
}

bool is_lacking(const ggml_tensor * part) {
    const neuron_kernel_store & kernels = ggml_backend_neuron_shared().kernels;
    if (!(part->flags & GGML_TENSOR_FLAG_COMPUTE) || !neuron_is_work(part) || neuron_is_zero(part)) {
        return false;
    }
    const auto answer = kernels.answer(part);
    return !answer->group && !answer->member && kernels.select_in_attention(part).empty() &&
           !is_longer_than_kernels(part);
}

// Adds the parts of a node that have no kernel; equal parts of several cores count once.
void add_lacking(const std::vector<const ggml_tensor *> & parts, neuron_missing_ops & missing) {
    std::unordered_set<uint64_t> added;
    for (const ggml_tensor * part : parts) {
        if (is_lacking(part) && added.insert(neuron_fingerprint(part)).second) {
            missing.add(part);
        }
    }
}

// Returns a message of ggml without the folders of its source file.
std::string without_folders(const std::string & message) {
    const size_t end = message.rfind('/', message.find(": "));
    return end == std::string::npos ? message : message.substr(end + 1);
}

}  // namespace

void neuron_reserved_begin(size_t n_cores) {
    mine().n_cores = neuron_recording() ? 0 : n_cores;
    neuron_reserved_drop();
}

void neuron_reserved_end() {
    if (mine().n_cores) {
        mine().n_cores = 0;
        neuron_reserved_drop();
    }
}

void neuron_reserved_note(const ggml_tensor * op) {
    reservation & r = mine();
    if (r.n_cores && r.known.insert(op).second) {
        r.asked.push_back(op);
    }
}

void neuron_reserved_drop() {
    mine().asked.clear();
    mine().known.clear();
}

bool neuron_reserved_takes(const ggml_tensor * part) {
    if (mine().splitting) {
        mine().parts.push_back(part);
    }
    return mine().splitting;
}

void neuron_reserved_say() {
    reservation & r = mine();
    if (r.asked.empty() || r.splitting) {
        return;
    }
    graph_copy         graph(r.asked);
    neuron_missing_ops missing;
    if (graph.is_possible()) {
        try {
            const splitting in_progress;
            graph.split([&](const ggml_tensor * t, const std::vector<const ggml_tensor *> & parts) {
                if (r.known.count(t)) {
                    add_lacking(parts, missing);
                }
            });
        } catch (const std::runtime_error & e) {
            NEURON_WARN("llama.cpp can't split a graph over %zu cores that it reserves memory for: to compute it ends "
                        "the program\n"
                        "%s\n",
                        r.n_cores, without_folders(e.what()).c_str());
        }
    }
    if (missing.say(ggml_backend_neuron_shared().kernels, "a reserved graph")) {
        NEURON_WARN("some parts of this model for %zu cores have no kernels; the lines above name them\n"
                    "to derive all that they need: kernelgen model MODEL.gguf -o MODEL.yaml --split-mode tensor "
                    "--devices %zu\n",
                    r.n_cores, r.n_cores);
    }
    neuron_reserved_drop();
}
