#include "report/statistics.h"

#include "report/metrics.h"
#include "select/tensors.h"
#include "weights/weights.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <utility>

// The most scans that are kept.
static constexpr size_t MAX_SCANS = 256;

// The most reasons in a line.
static constexpr size_t MAX_REASONS = 3;

static std::atomic<bool> g_any_graph{ false };

//
// one graph
//

// Calls a function with every tensor of the graph that a part belongs to.
template <typename F> static void for_each_tensor(const ggml_cgraph * part, F function) {
    const ggml_hash_set & set = part->visited_hash_set;
    for (size_t i = 0; i < set.size; i++) {
        if (ggml_bitset_get(set.used, i)) {
            function(set.keys[i]);
        }
    }
}

// Returns whether this is the whole graph. A part has no leaves of its own.
static bool is_whole(const ggml_cgraph * cgraph) {
    return cgraph->n_leafs > 0 || cgraph->visited_hash_set.size == 0;
}

static const char * const UNUSABLE = " (its kernel can't be used)";

// Returns whether no device has computed a part of this graph before. The parts of all devices come in the order of the
// graph's nodes, which are in one array.
static bool is_first_of_graph(const ggml_cgraph * part) {
    static thread_local const void *          set = nullptr;
    static thread_local ggml_tensor * const * end = nullptr;
    const bool first = part->visited_hash_set.keys != set || part->nodes < end || is_whole(part);
    set              = part->visited_hash_set.keys;
    end              = part->nodes + part->n_nodes;
    return first;
}

static size_t count_ops(const ggml_cgraph * cgraph) {
    return (size_t) std::count_if(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_is_work);
}

// Returns whether the program itself keeps a node off the device: one of the node's weights is elsewhere, and the
// device never refused the weight. The embedding of the input tokens is an example.
bool neuron_statistics::is_kept_elsewhere(const ggml_tensor * node) const {
    return neuron_is_kept_by_host(node) ||
           std::any_of(std::begin(node->src), std::end(node->src), [this](const ggml_tensor * src) {
               return src && neuron_is_weight(src) && !is_on_core(core, src) && !neuron_refused_weight(src);
           });
}

// Returns the kernel that a node of another backend lacks; "" when there is one, or when the program keeps the node
// elsewhere.
std::string neuron_statistics::lack_of(const ggml_tensor * node) const {
    const neuron_group group = kernels.select(node);
    if (group) {
        const bool broken =
            std::any_of(group.pieces.begin(), group.pieces.end(),
                        [this](const neuron_group_piece & piece) { return core.is_broken_locked(piece.kernel); });
        return broken ? neuron_describe(node) + UNUSABLE : "";
    }
    return is_kept_elsewhere(node) || !kernels.select_in_attention(node).empty() ? "" : neuron_describe(node);
}

// Scans all nodes of the graph whose first part this is. It looks up kernels only for nodes in other parts.
neuron_statistics::scan neuron_statistics::make_scan(const ggml_cgraph * first, neuron_missing_ops & missing) const {
    scan           found;
    neuron_reasons reasons;
    found.ops = count_ops(first);
    if (is_whole(first)) {
        return found;
    }
    size_t all = 0;
    for_each_tensor(first, [&all](const ggml_tensor * t) { all += neuron_is_work(t); });
    if (all <= found.ops) {
        return found;
    }
    found.ops = all;
    std::vector<const ggml_tensor *> own(first->nodes, first->nodes + first->n_nodes);
    std::sort(own.begin(), own.end());
    for_each_tensor(first, [&](const ggml_tensor * t) {
        if (neuron_is_work(t) && !neuron_is_zero(t) && !std::binary_search(own.begin(), own.end(), t)) {
            const std::string lack = lack_of(t);
            if (!lack.empty()) {
                reasons[lack]++;
                missing.add(t);
                found.lacking[t->op]++;
            }
        }
    });
    found.reasons = std::make_shared<const neuron_reasons>(std::move(reasons));
    return found;
}

// Parts of graphs that the scheduler divides have numbers that are never used again.
const neuron_statistics::scan & neuron_statistics::scan_of(const ggml_cgraph * first, neuron_missing_ops & missing) {
    if (scans.size() >= MAX_SCANS) {
        scans.clear();
    }
    const auto found = scans.find(first->uid);
    if (first->uid && found != scans.end()) {
        return found->second;
    }
    return scans[first->uid] = make_scan(first, missing);
}

// Returns the reasons of a graph's ops that have no kernel.
static neuron_reasons reasons_of(const neuron_graph_statistics & graph) {
    neuron_reasons reasons = graph.elsewhere ? *graph.elsewhere : neuron_reasons{};
    for (const auto & [reason, n] : graph.own ? graph.own->reasons : neuron_reasons{}) {
        reasons[reason] += n;
    }
    return reasons;
}

static size_t count(const neuron_reasons & reasons) {
    return std::accumulate(reasons.begin(), reasons.end(), (size_t) 0,
                           [](size_t n, const auto & reason) { return n + reason.second; });
}

void neuron_statistics::end_graph() {
    const size_t lacking =
        (current.elsewhere ? count(*current.elsewhere) : 0) + (current.own ? count(current.own->reasons) : 0);
    if (current.ops) {
        n_graphs++;
        n_lacking += lacking != 0;
    }
    if (lacking > worst.lacking) {
        worst         = std::move(current);
        worst.lacking = lacking;
    }
    current = {};
}

static std::shared_ptr<const neuron_plan_ops> ops_of(const neuron_plan & plan, neuron_missing_ops & missing) {
    const auto ops = std::make_shared<neuron_plan_ops>();
    for (const neuron_planned & planned : plan.nodes) {
        for (const neuron_member & member : planned.members) {
            if (!planned.launches.empty() || neuron_is_zero(member.node) || neuron_is_all_reduce(member.node)) {
                ops->device++;
                continue;
            }
            missing.add(member.node);
            // attention's other nodes have no kernels of their own
            const bool unusable = planned.unusable && member.node == planned.last();
            ops->reasons[neuron_describe(member.node) + (unusable ? UNUSABLE : "")]++;
        }
    }
    return ops;
}

void neuron_statistics::add(const ggml_cgraph * cgraph, const neuron_plan & plan) {
    g_any_graph = true;
    neuron_missing_ops missing;
    // Parts come in the order of the graph's nodes, which are in one array.
    const bool         first_of_all = is_first_of_graph(cgraph);
    const bool         first        = cgraph->visited_hash_set.keys != set || cgraph->nodes < end || is_whole(cgraph);
    if (first) {
        end_graph();
        const scan & whole = scan_of(cgraph, missing);
        current.ops        = whole.ops;
        current.elsewhere  = whole.reasons;
        if (first_of_all) {
            for (const auto & [op, n] : whole.lacking) {
                g_metrics.cpu[op].fetch_add(n, std::memory_order_relaxed);
            }
        }
    }
    // A program that examines single nodes (ggml_backend_sched_set_eval_callback) cuts parts into pieces without a
    // number.
    current.splits += first || cgraph->uid || cgraph->nodes != end;
    set = cgraph->visited_hash_set.keys;
    end = cgraph->nodes + cgraph->n_nodes;
    if (!plan.ops) {
        plan.ops = ops_of(plan, missing);
    }
    current.device += plan.ops->device;
    if (first) {
        current.own = plan.ops;  // the scan counts the nodes of other parts
    }
    missing.say(kernels);
}

//
// messages about graphs
//

// Returns the most frequent reasons.
static std::string first_of(const neuron_reasons & reasons) {
    std::vector<std::pair<std::string, size_t>> sorted(reasons.begin(), reasons.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto & a, const auto & b) { return a.second > b.second; });
    std::string text;
    for (size_t i = 0; i < sorted.size() && i < MAX_REASONS; i++) {
        text += (i ? "; " : "") + sorted[i].first;
    }
    const size_t more = sorted.size() - std::min(sorted.size(), MAX_REASONS);
    return text + (more ? "; and " + std::to_string(more) + " others" : "");
}

std::string neuron_statistics::summary() {
    end_graph();
    if (!worst.lacking) {
        return "";
    }
    const size_t elsewhere = worst.ops - std::min(worst.ops, worst.device + worst.lacking);
    return std::to_string(worst.device) + " of the " + std::to_string(worst.ops) +
           " ops of a graph ran on the device, in " + std::to_string(worst.splits) +
           (worst.splits == 1 ? " split, " : " splits, ") + std::to_string(worst.lacking) +
           " on the CPU because no kernel computes them" +
           (elsewhere ? ", " + std::to_string(elsewhere) + " elsewhere" : "") + "; " + std::to_string(n_lacking) +
           " of " + std::to_string(n_graphs) + " graphs lacked kernels: " + first_of(reasons_of(worst));
}

//
// programs whose graphs never reach a device
//

namespace {

struct refusals {
    std::mutex     mutex;
    neuron_reasons reasons;
};

// Never destroyed: it is read at exit.
refusals & all_refusals() {
    static auto * instance = new refusals;
    return *instance;
}

}  // namespace

void neuron_note_refused(const ggml_tensor * op) {
    if (g_any_graph) {
        return;
    }
    const std::lock_guard<std::mutex> lock(all_refusals().mutex);
    all_refusals().reasons.emplace(neuron_describe(op), 1);
}

std::string neuron_nothing_computed() {
    const std::lock_guard<std::mutex> lock(all_refusals().mutex);
    if (g_any_graph || all_refusals().reasons.empty()) {
        return "";
    }
    return "no graph had an op with a kernel; what has none: " + first_of(all_refusals().reasons);
}
