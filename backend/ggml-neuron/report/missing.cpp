#include "report/missing.h"

#include "../../bundle/src/key.h"
#include "report/log.h"
#include "report/manifest_text.h"
#include "report/record_ops.h"
#include "select/tensors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_set>

//
// the nearest kernel
//

// Returns in words which input an op writes to.
static std::string alias_text(int alias) {
    return alias == NEURON_KERNELS_NO_ALIAS ? "none" : std::to_string(alias);
}

static bool same_tensor(const neuron_kernels_tensor & a, const neuron_kernels_tensor & b) {
    return neuron_tensor_text(a) == neuron_tensor_text(b);
}

// Returns the differences, in words, between a kernel and a node of the same op.
static std::vector<std::string> differences(const ggml_tensor *      op,
                                            const neuron_signature & wanted,
                                            const neuron_signature & kernel) {
    std::vector<std::string> found;
    const auto               compare = [&](const std::string & name, const neuron_kernels_tensor & have,
                                           const neuron_kernels_tensor & want) {
        if (!same_tensor(have, want)) {
            found.push_back(name + " is " + neuron_tensor_text(have) + ", not " + neuron_tensor_text(want));
        }
    };
    neuron_kernels_tensor absent = {};
    absent.type                  = NEURON_KERNELS_ABSENT;
    for (int i = 0; i < std::max(wanted.n_src, kernel.n_src); i++) {
        compare("input " + std::to_string(i), i < kernel.n_src ? kernel.tensors[i] : absent,
                i < wanted.n_src ? wanted.tensors[i] : absent);
    }
    compare("output", kernel.tensors[kernel.n_src], wanted.tensors[wanted.n_src]);
    neuron_add_param_differences(op, kernel.op_params, found);
    if (kernel.alias != wanted.alias) {
        found.push_back("alias is " + alias_text(kernel.alias) + ", not " + alias_text(wanted.alias));
    }
    return found;
}

// Returns how many dimensions and strides differ; the kernel has as many inputs.
static size_t figures(const neuron_signature & wanted, const neuron_signature & kernel) {
    size_t n = 0;
    for (int i = 0; i <= std::min(wanted.n_src, kernel.n_src); i++) {
        const neuron_kernels_tensor & a = wanted.tensors[i];
        const neuron_kernels_tensor & b = kernel.tensors[i];
        if (a.type == NEURON_KERNELS_ABSENT || b.type == NEURON_KERNELS_ABSENT) {
            continue;
        }
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            n += a.ne[d] != b.ne[d];
            n += a.nb[d] != b.nb[d];
        }
    }
    return n;
}

// Sets strides to their values in keys.
static void canonicalize(neuron_signature & s) {
    for (int i = 0; i <= s.n_src; i++) {
        neuron_kernels_tensor & t = s.tensors[i];
        if (const nk::type_traits * type = nk::find_type(t.type)) {
            nk::canonicalize(*type, t.ne, t.nb);
        }
    }
}

std::string neuron_nearest(const ggml_tensor * op, const neuron_kernel_store & kernels) {
    neuron_signature wanted = neuron_signature_of(op);
    canonicalize(wanted);
    std::string              nearest;
    std::vector<std::string> how;
    size_t                   n_figures = 0;
    kernels.for_each(wanted.op_hash, [&](const char * id, const neuron_signature & kernel) {
        std::vector<std::string> parts = differences(op, wanted, kernel);
        const size_t             n     = figures(wanted, kernel);
        const bool               less  = parts.size() != how.size() ? parts.size() < how.size()
                                         : n != n_figures           ? n < n_figures
                                                                    : id < nearest;
        if (nearest.empty() || less) {
            nearest   = id;
            how       = std::move(parts);
            n_figures = n;
        }
    });
    for (size_t i = 0; i < how.size(); i++) {
        nearest += (i ? "; " : ": ") + how[i];
    }
    return nearest;
}

//
// messages
//

void neuron_missing_ops::add(const ggml_tensor * op) {
    const uint64_t fingerprint = neuron_fingerprint(op);
    const auto     added       = numbers.emplace(fingerprint, entries.size());
    if (added.second) {
        entries.push_back({ op, fingerprint, 0 });
    }
    entries[added.first->second].count++;
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
    return n_kernels ? "kernels of this op are for other shapes, types or parameters; GGML_NEURON_LOG=2 names the "
                       "nearest"
                     : "no bundle has a kernel of this op";
}

static void say_missing(const ggml_tensor * op, size_t count, const neuron_kernel_store & kernels) {
    const char *      reason = nullptr;
    const std::string line   = neuron_manifest_line(op, &reason);
    const std::string what   = neuron_describe(op);
    const std::string why    = why_none(op, kernels);
    const char *      nodes  = count == 1 ? "node" : "nodes";
    if (reason) {
        NEURON_WARN("no kernel for %s: the CPU computes it, %zu %s of this graph\n"
                    "%s\n",
                    what.c_str(), count, nodes, why.c_str());
    } else {
        NEURON_WARN("no kernel for %s: the CPU computes it, %zu %s of this graph\n"
                    "%s\n"
                    "to build one, add this line to a manifest's kernels: %s\n",
                    what.c_str(), count, nodes, why.c_str(), line.c_str());
    }
    if (neuron_log_repeats()) {
        const std::string nearest = neuron_nearest(op, kernels);
        if (!nearest.empty()) {
            NEURON_DEBUG("    nearest is %s\n", nearest.c_str());
        }
    }
}

namespace {

// Ops that were already reported. Never destroyed: destructors that run later may free backends.
struct said_ops {
    std::mutex                   mutex;
    std::unordered_set<uint64_t> known;
    std::unordered_set<int64_t>  longest{};  // kernels' numbers of cells that calls exceeded
    int                          n              = 0;
    bool                         told_more      = false;
    bool                         told_attention = false;
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
    // The entries are in the order of their addresses, which differ in each run.
    std::vector<entry> sorted = entries;
    std::sort(sorted.begin(), sorted.end(), [](const entry & a, const entry & b) {
        return a.count != b.count ? a.count > b.count : a.fingerprint < b.fingerprint;
    });
    said_ops &                        said = all_said();
    const std::lock_guard<std::mutex> lock(said.mutex);
    size_t                            more = 0;
    std::vector<const ggml_tensor *>  ops;
    std::transform(sorted.begin(), sorted.end(), std::back_inserter(ops), [](const entry & e) { return e.op; });
    const bool other    = say_other_attention(ops, kernels, said.told_attention);
    said.told_attention = said.told_attention || other;
    for (const entry & e : sorted) {
        if (!said.known.insert(e.fingerprint).second || kernels.select(e.op)) {
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
            say_missing(e.op, e.count, kernels);
        } else {
            more++;
        }
    }
    if (more && !said.told_more) {
        said.told_more = true;
        NEURON_WARN("%zu %s of this graph, and ops of later graphs: no kernel either\n"
                    "GGML_NEURON_LOG=2 names them, and GGML_NEURON_RECORD=FILE writes a manifest of all\n",
                    more, more == 1 ? "other op" : "other ops");
    }
}
