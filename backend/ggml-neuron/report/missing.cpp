#include "report/missing.h"

#include "../../bundle/src/ascii.h"
#include "../../bundle/src/key.h"
#include "report/log.h"
#include "report/record_graphs.h"
#include "select/tensors.h"
#include "weights/layouts.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

// Returns "(4096,512,1,1)/f32", with strides when the tensor has gaps or another order. Strides of dimensions with one
// element mean nothing and count as dense, as in a kernel's key.
static std::string tensor_text(const ggml_tensor * tensor) {
    const neuron_kernels_tensor t     = neuron_tensor_of(tensor);
    const ggml_type             type  = neuron_plain_type(t.type);
    const int64_t               block = ggml_blck_size(type);
    const size_t                unit  = ggml_type_size(type);
    size_t                      nb[GGML_MAX_DIMS];
    nb[0]        = t.ne[0] > block ? t.nb[0] : unit;
    bool   dense = nb[0] == unit;
    size_t next  = unit * (size_t) (t.ne[0] / block);
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        const size_t after = i == 1 ? nb[0] * (size_t) (t.ne[0] / block) : nb[i - 1] * (size_t) t.ne[i - 1];
        nb[i]              = t.ne[i] > 1 ? t.nb[i] : after;
        dense              = dense && nb[i] == next;
        next *= (size_t) t.ne[i];
    }
    char text[256];
    snprintf(text, sizeof(text), "(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")/%s", t.ne[0], t.ne[1], t.ne[2],
             t.ne[3], ggml_type_name(type));
    std::string result = text;
    if (const int32_t layout = t.type >> NEURON_KERNELS_FORM_SHIFT) {
        result += std::string(":") + neuron_layout_name(layout);
    }
    if (!dense) {
        snprintf(text, sizeof(text), "/(%zu,%zu,%zu,%zu)", nb[0], nb[1], nb[2], nb[3]);
        result += text;
    }
    return result;
}

std::string neuron_describe(const ggml_tensor * op) {
    std::string text = nk::lower(ggml_op_desc(op));
    for (int i = 0; i < neuron_n_src(op); i++) {
        text += (i ? ", " : " of ") + (op->src[i] ? tensor_text(op->src[i]) : "none");
    }
    return text;
}

void neuron_missing_ops::add(const ggml_tensor * op) {
    entry & e = entries.emplace(neuron_describe(op), entry{ op, 0 }).first->second;
    e.count++;
}

// Returns why no kernel computes an op.
static std::string why_none(const ggml_tensor * op, const neuron_kernel_store & kernels) {
    const std::string whole =
        !kernels.select_in_attention(op).empty()
            ? "they compute all nodes of attention together, and here one of them has no kernel, or "
              "others read its result"
            : neuron_why_not_cut(neuron_signature_of(op));
    if (!whole.empty()) {
        return "kernels for other numbers of tokens can't: " + whole;
    }
    size_t n_kernels = 0;
    kernels.for_each(neuron_signature_of(op).op_hash, [&](const char *, const neuron_signature &) { n_kernels++; });
    return n_kernels ? "kernels of this op are for other shapes, types or parameters"
                     : "no bundle has a kernel of this op";
}

namespace {

// Ops that were already reported. Never destroyed: destructors that run later may free backends.
struct said_ops {
    std::mutex                      mutex;
    std::unordered_set<std::string> known;
    std::unordered_set<int64_t>     longest{};  // kernels' numbers of cells that calls exceeded
    int                             n              = 0;
    bool                            told_more      = false;
    bool                            told_attention = false;
};

said_ops & all_said() {
    static auto * instance = new said_ops;
    return *instance;
}

}  // namespace

// Returns whether there are kernels for attention without flash attention.
static bool has_unfused_attention(const neuron_kernel_store & kernels) {
    bool found = false;
    kernels.for_each(nk::hash_op("soft_max"), [&found](const char *, const neuron_signature & s) {
        found =
            found || (s.n_src > NEURON_SOFT_MAX_MASK && s.tensors[NEURON_SOFT_MAX_MASK].type != NEURON_KERNELS_ABSENT);
    });
    return found;
}

// Returns whether a node may belong to attention without flash attention: its scores, and their weighted sums, are
// products per head.
static bool is_in_unfused_attention(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_SOFT_MAX:
            return op->src[NEURON_SOFT_MAX_MASK] != nullptr;
        case GGML_OP_MUL_MAT:
            return op->ne[2] > 1 || op->ne[3] > 1;
        case GGML_OP_SET_ROWS:
            return op->src[0]->ne[0] == 1;
        case GGML_OP_CONT:
            return true;
        default:
            return false;
    }
}

// Reports that a program runs with flash attention while the kernels are for attention without it, or the reverse.
// Returns whether it reported this.
static bool say_other_attention(const std::vector<const ggml_tensor *> & ops,
                                const neuron_kernel_store &              kernels,
                                bool                                     told) {
    const auto has = [&ops](ggml_op op) {
        return std::any_of(ops.begin(), ops.end(), [op](const ggml_tensor * t) {
            return t->op == op && (op != GGML_OP_SOFT_MAX || is_in_unfused_attention(t));
        });
    };
    const bool flash = kernels.has_op("flash_attn_ext");
    if (flash && has(GGML_OP_SOFT_MAX) && !has_unfused_attention(kernels)) {
        if (!told) {
            NEURON_WARN(
                "this context is without flash attention, kernels are for flash attention: the CPU computes attention\n"
                "kernelgen model derives kernels for flash attention, unless --flash-attn is off\n"
                "run the program with -fa on, or derive kernels with: kernelgen model --flash-attn both\n");
        }
        return true;
    }
    if (!flash && has(GGML_OP_FLASH_ATTN_EXT) && has_unfused_attention(kernels)) {
        if (!told) {
            NEURON_WARN("this context is with flash attention, kernels are without it: the CPU computes attention\n"
                        "the kernels were derived with: kernelgen model --flash-attn off\n"
                        "run the program with -fa off, or derive kernels with: kernelgen model --flash-attn both\n");
        }
        return true;
    }
    return false;
}

void neuron_missing_ops::say(const neuron_kernel_store & kernels) const {
    if (entries.empty() || neuron_recording()) {
        return;
    }
    // The texts' order breaks ties: it does not depend on addresses, which differ in each run.
    std::vector<std::pair<std::string, entry>> sorted(entries.begin(), entries.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto & a, const auto & b) { return a.second.count > b.second.count; });
    said_ops &                        said = all_said();
    const std::lock_guard<std::mutex> lock(said.mutex);
    size_t                            more  = 0;
    bool                              mends = false;
    std::vector<const ggml_tensor *>  ops;
    std::transform(sorted.begin(), sorted.end(), std::back_inserter(ops), [](const auto & e) { return e.second.op; });
    const bool other    = say_other_attention(ops, kernels, said.told_attention);
    said.told_attention = said.told_attention || other;
    for (const auto & [text, e] : sorted) {
        if (!said.known.insert(text).second || kernels.select(e.op)) {
            continue;
        }
        const int64_t n_kv = kernels.fewer_cells(e.op);
        if (n_kv && neuron_root_of(e.op->src[1])->op == GGML_OP_NONE) {  // attention to a cache
            if (said.longest.insert(n_kv).second) {
                NEURON_WARN(
                    "a call attends to %lld cells, more than the longest --n-kv of kernelgen model, %lld: the CPU "
                    "computes such attention\n",
                    (long long) e.op->src[1]->ne[1], (long long) n_kv);
            }
            continue;
        }
        if (other && !neuron_log_repeats() && (e.op->op == GGML_OP_FLASH_ATTN_EXT || is_in_unfused_attention(e.op))) {
            continue;  // already reported
        }
        if (said.n < NEURON_MOST_LINES || neuron_log_repeats()) {
            said.n++;
            mends = true;
            NEURON_WARN("no kernel for %s: the CPU computes it, %zu %s of this graph\n%s\n", text.c_str(), e.count,
                        e.count == 1 ? "node" : "nodes", why_none(e.op, kernels).c_str());
        } else {
            more++;
        }
    }
    if (more && !said.told_more) {
        said.told_more = true;
        NEURON_WARN("%zu %s of this graph, and ops of later graphs: no kernel either\n"
                    "GGML_NEURON_LOG=2 names them\n",
                    more, more == 1 ? "other op" : "other ops");
    }
    if (mends) {
        NEURON_WARN("to build the kernels that are missing, run the program again with GGML_NEURON_RECORD=FILE\n"
                    "then: kernelgen model FILE -o more.yaml && kernelgen build more.yaml -o more\n"
                    "kernelgen coverage KERNELS --graph-ops FILE names the nearest kernels\n");
    }
}
